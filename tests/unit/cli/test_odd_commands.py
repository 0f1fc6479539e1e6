"""What a person may get wrong is one message and no traceback; `check` and `submit` agree about every recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine, data_folders, run_llmlaunch

QUICKSTART = str(asset("recipes", "quickstart.yaml"))
LONG = "x" * 5000
DISAGREE = (
    "nodes=-1", "slurm={account: ''}", "slurm={comment: '  '}", "slurm={tiem: 1}", "slurm={exclude: ''}",
    "environment={A: ''}", "setup=['echo \"$(']", "container={image: a.sif, mounts: ['/a,b:/c']}",
    "backend.extra_args=[--nope]", "layout={tensor: 3}", "cluster={base: cpu-x1, accelerator: {memory_gib: 0.1}}",
    "what_if={weight_versions: 2}", "training.checkpoint_path=/a,b:c", "name='a b'", "python=''", "restart={by: odd}",
    "training.steps=0", "data={mock: true}", "model={base: llama3-8b}",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("measurements", "export", LONG), ("status", LONG), ("status", "~nobody-here"), ("check", LONG),
        ("accuracy", "deep.json"), ("measurements", "import", "deep.json"), ("runs", "--limit", "9" * 20),
        ("check", "binary.yaml"), ("check", "empty.yaml"), ("check", "loop"), ("render", QUICKSTART, "-o", "loop"),
        ("logs", "folder", "--tail", "-1"), ("plan", QUICKSTART, "--plot", "folder"), ("resume", ""), ("cancel", "/"),
    ],
)  # fmt: skip
def test_an_odd_command_line_is_one_message(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 100_000 + "\n")
    (tmp_path / "binary.yaml").write_bytes(b"\x80\xff\x00")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    assert llmlaunch(*arguments, code=2).stderr.lower().count("error: ") == 1


@pytest.mark.parametrize("override", DISAGREE)
def test_check_and_submit_agree(tmp_path: Path, override: str) -> None:
    check, submit, render = (
        run_llmlaunch(tmp_path, command, QUICKSTART, override, *options, **data_folders(tmp_path))
        for command, *options in (("check",), ("submit", "--dry-run"), ("render", "-o", "run"))
    )
    assert "Traceback" not in check.stderr + submit.stderr + render.stderr
    codes = (check.returncode, submit.returncode, render.returncode)
    if override.startswith("what_if"):  # priced by check; no backend runs it
        assert codes == (0, 2, 2)
    else:
        assert codes[0] == codes[1] == codes[2], (check.stderr, submit.stderr, render.stderr)
    warnings = [[line for line in done.stderr.splitlines() if line.startswith("warning: ")] for done in (check, submit)]
    assert warnings[0] == warnings[1]
