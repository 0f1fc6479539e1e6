"""`llmlaunch` as a library: objects whose JSON is what the command prints; the examples of the documentation run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmlaunch
from llmlaunch.assets import asset
from support.command_line import CommandLine, data_folders

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = asset("recipes", "quickstart.yaml")


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in data_folders(tmp_path).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch)


def as_printed(value: object) -> object:
    return json.loads(json.dumps(value))


def test_a_plan_and_its_estimate_are_what_check_prints(cli: CommandLine) -> None:
    printed = cli.json("check", QUICKSTART, "training.steps=20")
    run = llmlaunch.plan(llmlaunch.load_recipe(QUICKSTART, ["training.steps=20"]))
    assert as_printed(run.to_json()) == printed
    assert as_printed(run.memory.to_json()) == printed["memory"]
    assert (run.verdict, run.step_seconds) == (printed["verdict"], printed["step_seconds"])
    estimate = llmlaunch.estimate(QUICKSTART, ["training.steps=20"])
    assert (estimate.limit_bytes, estimate.margin) == (printed["memory"]["limit_bytes"], printed["memory"]["margin"])
    assert [rank.device_bytes for rank in estimate.estimate.ranks] == [
        rank["device_bytes"] for rank in printed["memory"]["ranks"]
    ]


def test_render_writes_what_the_command_writes_and_refuses_what_is_not_safe(cli: CommandLine, tmp_path: Path) -> None:
    run = llmlaunch.plan(QUICKSTART)
    directory = llmlaunch.render(run, tmp_path / "api")
    cli("render", QUICKSTART, "-o", tmp_path / "cli")
    names = {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}
    assert names == {path.relative_to(tmp_path / "cli") for path in (tmp_path / "cli").rglob("*") if path.is_file()}
    assert all((directory / name).read_bytes() == (tmp_path / "cli" / name).read_bytes() for name in names)
    assert run.files().keys() == {str(name) for name in names}
    with pytest.raises(llmlaunch.NothingSafe):
        llmlaunch.render(QUICKSTART, tmp_path / "unsafe", ["memory.limit=0.01"])
    assert not (tmp_path / "unsafe").exists()


def test_a_store_that_is_not_there_has_no_runs_and_no_measurements() -> None:
    assert llmlaunch.runs() == []
    assert llmlaunch.measurements() == []


def test_measurements_are_what_the_command_lists(cli: CommandLine) -> None:
    cli("measurements", "import", ROOT / "tests" / "data" / "measurements" / "outcomes.jsonl")
    records = llmlaunch.measurements(backend="megatron-lm")
    printed = cli.json("measurements", "list", "--backend", "megatron-lm")["measurements"]
    assert [record.to_json() for record in records] == printed
    assert {record.peak_kind for record in records} <= {"oom", "fits"}


def test_a_mistake_is_one_exception_with_the_commands_exit_code(tmp_path: Path) -> None:
    with pytest.raises(llmlaunch.UserError, match=r"missing\.yaml") as mistake:
        llmlaunch.plan(tmp_path / "missing.yaml")
    assert mistake.value.exit_code == 2


def test_importing_the_package_imports_nothing_of_it() -> None:
    program = "import sys, llmlaunch; print([m for m in sys.modules if m.startswith('llmlaunch.') or m == 'numpy'])"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
    assert set(llmlaunch.__all__) <= set(dir(llmlaunch))
    assert all(getattr(llmlaunch, name) is not None for name in llmlaunch.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = llmlaunch.no_such_name


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").symlink_to(QUICKSTART.parent)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text("utf-8"), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "docs/python.md", "exec"), {})
