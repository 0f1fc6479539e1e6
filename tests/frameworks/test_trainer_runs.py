"""The shipped training script, for real: two processes on this machine's CPU under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.base import NodeVariable, Rendered
from llmlaunch.backends.deepspeed import DeepSpeed
from llmlaunch.backends.logs import parse_progress
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import TRAINER

pytestmark = pytest.mark.frameworks

TINY = (
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 256}",
    "training.sequence_length=64",
    "training.global_batch_size=8",
    "training.steps=12",
    "training.learning_rate=0.01",
)
MIXTURE = "model.moe={num_experts: 4, topk: 2, ffn_hidden_size: 96}"
SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(program: list[str], environment: dict[str, str], processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node_rank=0"]
    command += [f"--nproc_per_node={processes}", "--rdzv_backend=static", "--master_addr=127.0.0.1"]
    command += [f"--master_port={free_port()}", "--max_restarts=0", *program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **environment}, text=True, start_new_session=True, **pipes)


def lay_out(folder: Path, layout: Layout, *overrides: str) -> Rendered:
    """The rendered files in `folder`, as `llmlaunch render` would lay them."""
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), (*TINY, *overrides))
    rendered = DeepSpeed().render(recipe, layout)
    for name, content in rendered.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return rendered


def start(folder: Path, rendered: Rendered) -> subprocess.Popen[str]:
    """The rendered job, as train.sh would start it."""
    words = [f"{folder}{word.suffix}" if isinstance(word, NodeVariable) else word for word in rendered.program]
    return torchrun(words, dict(rendered.environment))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors. Nothing it started outlives it."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def losses(output: str) -> list[float]:
    lines = [parse_progress(line) for line in output.splitlines()]
    return [line.loss for line in lines if line is not None and line.loss is not None]


@pytest.mark.parametrize(
    ("stage", "micro_batch_size", "recompute"),
    [(0, 4, RECOMPUTE_NONE), (1, 2, RECOMPUTE_NONE), (2, 2, RECOMPUTE_FULL), (3, 4, RECOMPUTE_NONE)],
)
def test_it_learns_the_same_whatever_the_split(
    tmp_path: Path, stage: int, micro_batch_size: int, recompute: int
) -> None:
    layout = Layout(data=2, micro_batch_size=micro_batch_size, zero_stage=stage, recompute=recompute)
    code, out, err = finish(start(tmp_path, lay_out(tmp_path, layout)))
    assert code == 0, err
    seen = losses(out)
    assert len(seen) == 12
    assert seen[-1] < seen[0] - 1.0, "the loss does not fall"
    # The first step of every ZeRO stage starts from the same weights.
    assert seen[0] == pytest.approx(5.55, abs=0.03)


def test_a_mixture_trains_in_bf16(tmp_path: Path) -> None:
    layout = Layout(data=2, micro_batch_size=4, zero_stage=2)
    code, out, err = finish(start(tmp_path, lay_out(tmp_path, layout, MIXTURE, "training.precision=bf16")))
    assert code == 0, err
    assert losses(out)[-1] < losses(out)[0] - 0.5


def test_it_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    layout = Layout(data=2, micro_batch_size=4, zero_stage=1)
    saving = ("training.save_interval=2", f"training.checkpoint_path={tmp_path / 'checkpoints'}")
    first, _, err = finish(start(tmp_path, lay_out(tmp_path, layout, *saving, "training.steps=2")))
    assert first == 0, err
    second, out, err = finish(start(tmp_path, lay_out(tmp_path, layout, *saving, "training.steps=4")))
    assert second == 0, err
    steps = [line.step for line in map(parse_progress, out.splitlines()) if line is not None]
    assert steps == [3, 4]


def test_a_loss_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    rendered = lay_out(tmp_path, Layout(data=2, micro_batch_size=4, zero_stage=1))
    model = tmp_path / "trainer" / "model.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "rms_norm_eps": float("nan")}))
    code, _, err = finish(start(tmp_path, rendered))
    assert code != 0
    assert "step 1: the loss is nan" in err


@pytest.mark.faults
def test_a_rank_that_dies_fails_the_job(tmp_path: Path) -> None:
    layout = Layout(data=2, micro_batch_size=4, zero_stage=1)
    process = start(tmp_path, lay_out(tmp_path, layout, "training.steps=100000"))
    assert process.stdout is not None
    for line in process.stdout:
        if parse_progress(line) is not None:
            break
    victim = next(pid for pid in children(process.pid) if b"train.py" in command_line(pid))
    os.kill(victim, signal.SIGKILL)
    code, _, _ = finish(process)
    assert code != 0


def test_the_idle_trainer_is_measured() -> None:
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    began = time.time()
    code, out, err = finish(torchrun([str(TRAINER), "--measure-baseline"], environment, processes=1))
    assert code == 0, err
    said = json.loads(out.splitlines()[-1])
    assert said["event"] == "baseline"
    assert 200e6 < said["resident_bytes"] <= said["resident_peak_bytes"] < 2e9
    assert not built_since(began), "an extension was compiled; the quickstart must not wait for a compiler"


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def built_since(moment: float) -> list[Path]:
    place = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    return [path for path in place.rglob("*.so") if path.stat().st_mtime >= moment]
