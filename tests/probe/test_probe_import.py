"""How the probe gets into a Python: by the import of torch that the trainer makes, or not at all. A tiny package stands
in for torch, with the queue of calls that the real one has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.probe_rig import GIB, SMALL_CUDA, ProbeRig

USES_CUDA = "import torch; torch.cuda.init(); print('trained')"


def test_the_import_of_torch_starts_the_probe(probed: ProbeRig, small_torch: Path) -> None:
    assert probed.trained(USES_CUDA, PYTHONPATH=str(small_torch)) == "trained\n"
    assert probed.peaks().reserved_peak_bytes == GIB


def test_the_import_leaves_no_trace(probed: ProbeRig, small_torch: Path) -> None:
    text = "import sys, torch; print(vars(torch.cuda.__loader__), [type(one).__name__ for one in sys.meta_path])"
    probed_one = probed.trained(text, PYTHONPATH=str(small_torch))
    (probed.run_directory / "hook" / "llmlaunch_memory_probe.py").unlink()
    assert probed.trained(text, PYTHONPATH=str(small_torch)) == probed_one


def test_a_program_without_torch_runs_as_before(probed: ProbeRig) -> None:
    text = (
        "import threading, sys; print(threading.active_count(), [n for n in ('ctypes', 'torch') if n in sys.modules])"
    )
    assert probed.trained(text) == "1 []\n"
    assert not (probed.attempt_directory / "memory").exists()


def test_a_failed_import_of_torch_fails_as_before_and_may_be_retried(probed: ProbeRig, small_torch: Path) -> None:
    cuda = small_torch / "torch" / "cuda" / "__init__.py"
    cuda.write_text("import os\nif not os.environ.get('MENDED'):\n    raise ImportError('no libcudart')\n" + SMALL_CUDA)
    text = (
        "import os\ntry:\n    import torch\nexcept ImportError as error:\n    print(error)\n"
        "os.environ['MENDED'] = '1'\nimport torch; torch.cuda.init()"
    )
    assert probed.trained(text, PYTHONPATH=str(small_torch)) == "no libcudart\n"
    assert probed.peaks().reserved_peak_bytes == GIB


def test_a_missing_torch_raises_the_usual_error(probed: ProbeRig) -> None:
    text = "import importlib.util\ntry:\n    import torch.cuda\nexcept ModuleNotFoundError as e:\n    print(e.name)"
    assert probed.trained("import sys; sys.modules['torch'] = None\n" + text) == "torch.cuda\n"


@pytest.mark.parametrize("words", [("-I",), ("-E",), ("-S",)])
def test_a_python_that_reads_no_hook_trains_without_the_probe(
    probed: ProbeRig, small_torch: Path, words: tuple[str, ...]
) -> None:
    text = f"import sys; sys.path.insert(0, {str(small_torch)!r}); " + USES_CUDA
    assert probed.trained(text, *words) == "trained\n"
    assert probed.files == []


@pytest.mark.parametrize("broken", ["absent", "unreadable code", "nothing to ask"])
def test_a_broken_probe_does_not_affect_training(probed: ProbeRig, small_torch: Path, broken: str) -> None:
    file = probed.run_directory / "hook" / "llmlaunch_memory_probe.py"
    if broken == "absent":
        file.unlink()
    elif broken == "unreadable code":
        file.write_text("def start(:\n")
    else:
        (small_torch / "torch" / "_C.py").write_text("")
    process = probed.train(USES_CUDA, PYTHONPATH=str(small_torch))
    said, errors = process.communicate(timeout=300)
    assert (said, errors, process.returncode) == ("trained\n", "", 0)
    assert probed.files == []


def test_a_torch_imported_before_the_hook_is_found(probed: ProbeRig, small_torch: Path, tmp_path: Path) -> None:
    """A .pth file of the site's may import it; those are read before any sitecustomize."""
    early = f"import sys; sys.path.insert(0, {str(small_torch)!r}); import torch; sys.path.insert(0, sys.argv[1])"
    run = f"{early}; import sitecustomize; {USES_CUDA}"
    process = probed.rank(sys.executable, "-S", "-c", run, str(probed.run_directory / "hook"))
    assert process.communicate(timeout=300)[0] == "trained\n"
    assert probed.peaks().reserved_peak_bytes == GIB


def test_a_program_started_by_the_trainer_has_its_own_account(probed: ProbeRig, small_torch: Path) -> None:
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {USES_CUDA!r}], check=True); " + USES_CUDA
    assert probed.trained(text, PYTHONPATH=str(small_torch)).split() == ["trained", "trained"]
    assert len(probed.accounts()) == 2


def test_without_a_hook_no_variable_is_set(probed: ProbeRig, small_torch: Path) -> None:
    (probed.run_directory / "hook" / "sitecustomize.py").unlink()
    text = "import os; print([name for name in os.environ if name.startswith('LLMLAUNCH_PROBE')]); " + USES_CUDA
    assert probed.trained(text, PYTHONPATH=str(small_torch)) == "[]\ntrained\n"
    assert probed.files == []
