"""What a person may get wrong is one message and no traceback; `check` and `submit` agree about every recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
LONG = "x" * 5000
DISAGREE = (
    "nodes=-1", "slurm={account: ''}", "slurm={comment: '  '}", "slurm={tiem: 1}", "slurm={exclude: ''}",
    "environment={A: ''}", "setup=['echo \"$(']", "container={image: a.sif, mounts: ['/a,b:/c']}",
    "backend.extra_args=[--nope]", "layout={tensor: 3}", "cluster={base: cpu-x1, accelerator: {memory_gib: 0.1}}",
    "what_if={weight_versions: 2}", "training.checkpoint_path=/a,b:c", "name='a b'", "python=''", "restart={by: odd}",
    "training.steps=0", "data={mock: true}", "model={base: llama3-8b}",
)  # fmt: skip


def llmlaunch(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_DATA_HOME": str(place / "data")}
    argv = [sys.executable, "-m", "llmlaunch", *words]
    done = subprocess.run(argv, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    "words",
    [
        ("measurements", "export", LONG), ("status", LONG), ("status", "~nobody-here"), ("check", LONG),
        ("accuracy", "deep.json"), ("measurements", "import", "deep.json"), ("runs", "--limit", "9" * 20),
        ("check", "binary.yaml"), ("check", "empty.yaml"), ("check", "loop"), ("render", QUICKSTART, "-o", "loop"),
        ("logs", "folder", "--tail", "-1"), ("plan", QUICKSTART, "--plot", "folder"), ("resume", ""), ("cancel", "/"),
    ],
)  # fmt: skip
def test_an_odd_command_line_is_one_message(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000 + "\n")
    (tmp_path / "binary.yaml").write_bytes(b"\x80\xff\x00")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    done = llmlaunch(tmp_path, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.lower().count("error: ") == 1


@pytest.mark.parametrize("override", DISAGREE)
def test_check_and_submit_agree(tmp_path: Path, override: str) -> None:
    check = llmlaunch(tmp_path, "check", QUICKSTART, override)
    submit = llmlaunch(tmp_path, "submit", QUICKSTART, override, "--dry-run")
    render = llmlaunch(tmp_path, "render", QUICKSTART, override, "-o", "run")
    codes = (check.returncode, submit.returncode, render.returncode)
    if override.startswith("what_if"):  # priced by check; no backend runs it
        assert codes == (0, 2, 2)
    else:
        assert codes[0] == codes[1] == codes[2], (check.stderr, submit.stderr, render.stderr)
    warned = [[line for line in done.stderr.splitlines() if line.startswith("warning: ")] for done in (check, submit)]
    assert warned[0] == warned[1]
