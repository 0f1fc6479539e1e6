"""The command line: results alone on stdout, one message and the right exit code for every mistake, nothing written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from llmlaunch.assets import asset
from llmlaunch.cli.init import command as init

ROOT = Path(__file__).resolve().parents[3]
GOOD = """\
schema: 1
name: mine
model: llama3-8b
backend: megatron-lm
cluster: h100-80gb-x8
nodes: 4
training: {sequence_length: 8192, global_batch_size: 512, steps: 10}
data: {mock: true}
layout: auto
"""


def llmlaunch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmlaunch", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def written(folder: Path, text: str = GOOD, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def changed(key: str, value: str) -> str:
    """GOOD with one line replaced."""
    lines = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in GOOD.splitlines()]
    assert lines != GOOD.splitlines()
    return "\n".join(lines) + "\n"


BY_DATA = changed("layout", "{tensor: 1, pipeline: 1, context: 1}")
BAD = [
    ("unknown model", changed("model", "llama9-8b"), "llama9-8b"),
    ("unknown cluster", changed("cluster", "h900-80gb-x8"), "h900-80gb-x8"),
    ("unknown GPU", changed("cluster", "{base: h100-80gb-x8, accelerator: h900}"), "h900"),
    ("unknown key", GOOD + "lr: 1\n", "lr"),
    ("duplicate key", GOOD + "name: other\n", "name"),
    ("a number YAML reads as text", changed("nodes", "1e1"), "1e1"),
    ("heads not divisible", changed("model", "{base: llama3-8b, num_attention_heads: 33, num_query_groups: 11}"), "33"),
    ("batch not divisible", BY_DATA.replace("megatron-lm", "deepspeed").replace("512", "7"), "batch"),
    ("two lengths", changed("training", "{sequence_length: 8, global_batch_size: 8, steps: 1, tokens: 1T}"), "tokens"),
    ("nodes beyond the budget", GOOD + "budget: {max_nodes: 2}\n", "budget.max_nodes"),
    ("nodes that no count could be", changed("nodes", "auto").replace("layout: auto", "layout: {data: 3}"), "batch"),
    ("more stages than layers", changed("layout", "{pipeline: 64}"), "layers"),
    ("NaN", changed("training", "{sequence_length: .nan, global_batch_size: 512, steps: 10}"), "sequence_length"),
    ("a negative size", changed("nodes", "-4"), "nodes"),
    ("a list", "- schema: 1\n", "list"),
    ("empty", "", "empty"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["check", "plan", "submit"])
@pytest.mark.parametrize(("what", "text", "named"), BAD, ids=[case[0] for case in BAD])
def test_a_bad_recipe_is_one_message_and_exit_code_2(
    tmp_path: Path, command: str, what: str, text: str, named: str
) -> None:
    written(tmp_path, text)
    answer = llmlaunch(tmp_path, command, "recipe.yaml", *(("--local",) if command == "submit" else ()))
    assert answer.returncode == 2, answer.stderr
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    assert "recipe.yaml" in answer.stderr
    assert named in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_folder_a_missing_an_unreadable_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(50 * 2**20)
    for name in ("folder.yaml", "missing.yaml", "huge.yaml"):
        answer = llmlaunch(tmp_path, "check", name)
        assert answer.returncode == 2, (name, answer.stderr)
        assert name in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1


def test_nothing_safe_is_exit_code_3_with_what_would_fit_and_nothing_is_written(tmp_path: Path) -> None:
    written(tmp_path, changed("model", "llama3-405b"))
    for words in (("check",), ("plan",), ("submit", "--local"), ("render", "-o", "run")):
        answer = llmlaunch(tmp_path, words[0], "recipe.yaml", *words[1:])
        assert answer.returncode == 3, answer.stderr
        assert "Smallest change that fits" in answer.stderr
        assert "pipeline rank" in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_json_is_the_result_alone_in_the_published_shape(tmp_path: Path) -> None:
    written(tmp_path)
    answer = llmlaunch(tmp_path, "check", "recipe.yaml", "--json")
    assert answer.returncode == 0
    plan = json.loads(answer.stdout)
    shape = {
        "recipe",
        "verdict",
        "layout",
        "memory",
        "step_seconds",
        "tokens_per_second_per_gpu",
        "searched",
        "refused",
    }
    assert shape | {"alternatives"} <= set(plan)
    assert {"limit_bytes", "margin", "ranks", "host_bytes_per_node"} <= set(plan["memory"])
    for rank in plan["memory"]["ranks"]:
        assert sum(rank["terms"].values()) == rank["device_bytes"]
    more = json.loads(llmlaunch(tmp_path, "plan", "recipe.yaml", "--json").stdout)
    assert more.pop("neighbours")
    assert more == plan


def test_plan_shows_neighbours_the_front_and_the_heat_map(tmp_path: Path) -> None:
    written(tmp_path)
    answer = llmlaunch(tmp_path, "plan", "recipe.yaml", "--pareto", "--plot", "grid.svg")
    assert answer.returncode == 0, answer.stderr
    for part in ("Ranked layouts", "Neighbours of this layout", "Pareto front", "refused, each for the first reason"):
        assert part in answer.stdout
    assert (tmp_path / "grid.svg").read_text().startswith("<svg")
    plan = json.loads(llmlaunch(tmp_path, "plan", "recipe.yaml", "--pareto", "--json").stdout)
    jsonschema.validate(plan, json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text()))
    seconds = [one["step_seconds"] for one in plan["pareto"]]
    assert seconds == sorted(seconds)
    assert seconds[0] <= plan["step_seconds"] <= 1.001 * seconds[0], "the plainest of the fastest is chosen"
    assert all(one["device_bytes"] <= plan["memory"]["limit_bytes"] for one in plan["pareto"])


def test_a_picture_that_is_no_svg_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    answer = llmlaunch(tmp_path, "plan", "recipe.yaml", "--plot", "grid.png")
    assert answer.returncode == 2
    assert answer.stderr == "error: grid.png: --plot writes SVG; give a name that ends in .svg\n"


def test_pins_that_contradict_each_other_are_one_message_with_both_lines(tmp_path: Path) -> None:
    pins = "\n  recompute: full\n  virtual_pipeline: 4\n  pipeline: 1"
    written(tmp_path, changed("layout", pins))
    answer = llmlaunch(tmp_path, "check", "recipe.yaml")
    assert answer.returncode == 2
    assert "recipe.yaml:12: layout.pipeline: 1 contradicts layout.virtual_pipeline: 4 (recipe.yaml:11)" in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_a_pinned_layout_that_overflows_says_the_rank_the_term_and_a_change_that_works(tmp_path: Path) -> None:
    pins = "layout={tensor: 1, pipeline: 1, context: 1, micro_batch_size: 2, recompute: none}"
    written(tmp_path)
    answer = llmlaunch(tmp_path, "plan", "recipe.yaml", pins, "--json")
    assert answer.returncode == 3
    plan = json.loads(answer.stdout)
    assert "pipeline rank 0 needs" in answer.stderr
    assert "most of it" in answer.stderr
    assert plan["advice"] in answer.stderr
    words = [f"{key}={json.dumps(value)}" for key, value in plan["changes"].items()]
    assert llmlaunch(tmp_path, "check", "recipe.yaml", pins, *words).returncode == 0


def test_overrides_change_the_recipe(tmp_path: Path) -> None:
    written(tmp_path)
    plan = json.loads(llmlaunch(tmp_path, "check", "recipe.yaml", "layout={tensor: 4}", "nodes=8", "--json").stdout)
    assert plan["layout"]["tensor"] == 4
    assert (
        plan["layout"]["tensor"] * plan["layout"]["data"] * plan["layout"]["pipeline"] * plan["layout"]["context"] == 64
    )


def test_nodes_may_be_chosen_in_every_command(tmp_path: Path) -> None:
    written(tmp_path, changed("nodes", "auto"))
    answer = llmlaunch(tmp_path, "check", "recipe.yaml", "--json")
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout)
    nodes = plan["sizing"]["nodes"]
    assert [tried["refused"] is None for tried in plan["sizing"]["tried"]] == [False] * (nodes - 1) + [True]
    assert plan["job"]["steps"] == 10
    fixed = json.loads(llmlaunch(tmp_path, "check", "recipe.yaml", f"nodes={nodes}", "--json").stdout)
    assert fixed == {**plan, "sizing": None}
    assert f"nodes: auto: the smallest cluster that does has {nodes} node" in llmlaunch(
        tmp_path, "plan", "recipe.yaml"
    ).stdout  # fmt: skip
    assert f"#SBATCH --nodes={nodes}\n" in llmlaunch(tmp_path, "submit", "recipe.yaml", "--dry-run").stdout
    assert llmlaunch(tmp_path, "render", "recipe.yaml", "-o", "run").returncode == 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["nodes"] == nodes
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == plan


def test_a_budget_that_is_not_met_is_exit_code_3_and_nothing_is_written(tmp_path: Path) -> None:
    written(tmp_path, GOOD + "budget: {days: 0.0001}\n")
    for words in (("check",), ("plan",), ("submit", "--dry-run"), ("render", "-o", "run")):
        answer = llmlaunch(tmp_path, words[0], "recipe.yaml", *words[1:])
        assert answer.returncode == 3, answer.stderr
        assert "of budget.days: 0.0001" in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_check_says_how_long_the_job_is(tmp_path: Path) -> None:
    written(tmp_path)
    text = llmlaunch(tmp_path, "check", "recipe.yaml", "training.tokens=300B", 'slurm.time="24:00:00"').stdout
    assert "Job: 71,526 steps, 300B tokens: " in text
    assert " GPU-hours\n" in text
    assert "Assumed: SLURM ends the job after 24 h 0 min (slurm.time)" in text


def test_a_profile_of_a_site_needs_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    alone = llmlaunch(tmp_path, "init", "--site")
    assert (alone.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "no SLURM here (scontrol is not on PATH); run it on a login node of the cluster" in alone.stderr
    assert "--partition belongs to --site" in llmlaunch(tmp_path, "init", "--partition", "gpu").stderr


def test_init_writes_a_recipe_that_is_safe_and_never_over_a_file(tmp_path: Path) -> None:
    listed = llmlaunch(tmp_path, "init", "--list").stdout.split()
    assert {"llama3-70b", "llama3-8b", "quickstart"} <= set(listed)
    for name in ("llama3-70b", "quickstart"):
        assert llmlaunch(tmp_path, "init", name).returncode == 0
        assert llmlaunch(tmp_path, "check", f"{name}.yaml").returncode == 0
    for name in set(listed) - {"llama3-70b", "quickstart"}:  # what the tests of the gallery find safe, byte by byte
        path = tmp_path / f"{name}.yaml"
        CliRunner().invoke(init, [name, "-o", str(path)], catch_exceptions=False)
        assert path.read_bytes() == asset("recipes", path.name).read_bytes()
    again = llmlaunch(tmp_path, "init", "quickstart")
    assert again.returncode == 2
    assert "left as it is" in again.stderr
    assert "no recipe named" in llmlaunch(tmp_path, "init", "nonsense").stderr


def test_render_refuses_a_folder_that_holds_files(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep me")
    answer = llmlaunch(tmp_path, "render", "recipe.yaml", "-o", "run")
    assert answer.returncode == 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_dry_run_shows_the_script_and_writes_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    answer = llmlaunch(tmp_path, "submit", "recipe.yaml", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    assert "#SBATCH --nodes=4" in answer.stdout
    assert "--tensor-model-parallel-size" in answer.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_what_dry_run_shows_is_what_render_writes(tmp_path: Path) -> None:
    written(tmp_path)
    shown = llmlaunch(tmp_path, "submit", "recipe.yaml", "--dry-run").stdout
    assert llmlaunch(tmp_path, "render", "recipe.yaml", "-o", "run").returncode == 0
    assert (tmp_path / "run" / "job.sbatch").read_text() in shown
    assert (tmp_path / "run" / "train.sh").read_text() in shown


def test_local_runs_refuse_several_nodes_and_write_nothing(tmp_path: Path) -> None:
    answer = llmlaunch(tmp_path, "submit", str(ROOT / "recipes" / "quickstart.yaml"), "nodes=2", "--local", "-o", "run")
    assert answer.returncode == 2
    assert "this machine is one" in answer.stderr
    assert not (tmp_path / "run").exists()


def test_accuracy_answers_for_every_record(tmp_path: Path) -> None:
    for name, count in (("fit", 363), ("outcomes", 324)):
        path = ROOT / "tests" / "data" / "measurements" / f"{name}.jsonl"
        answer = llmlaunch(tmp_path, "accuracy", str(path), "--json")
        assert answer.returncode == 0, answer.stderr
        result = json.loads(answer.stdout)
        assert len(result["records"]) == count
        assert result["families"]


def test_a_run_that_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    for command in ("status", "logs", "cancel", "resume"):
        answer = llmlaunch(tmp_path, command, "nowhere")
        assert answer.returncode == 2
        assert "nowhere" in answer.stderr
        assert "Traceback" not in answer.stderr


def test_a_bug_of_ours_is_a_traceback_with_a_hint_to_report_it(tmp_path: Path) -> None:
    program = (
        "import llmlaunch.recipe.load as load\n"
        "def broken(*words): raise RuntimeError('boom')\n"
        "load.load_recipe = broken\n"
        "from llmlaunch.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "check", "recipe.yaml"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert answer.returncode == 1
    assert "Traceback" in answer.stderr
    assert "Please report it" in answer.stderr


def test_the_command_line_is_frozen_a_new_option_is_a_decision() -> None:
    import importlib

    from llmlaunch.cli.main import COMMANDS, module_of

    options = {
        name: sorted(p.name or "" for p in importlib.import_module(f"llmlaunch.cli.{module_of(name)}").command.params)
        for name in COMMANDS
    }
    assert options == {
        "init": ["name", "output", "partition", "show", "site"],
        "check": ["as_json", "overrides", "recipe"],
        "plan": ["as_json", "overrides", "plot", "recipe", "with_front"],
        "render": ["as_json", "output", "overrides", "recipe"],
        "rehearse": ["as_json", "install_frameworks", "output", "overrides", "place", "rank", "recipe"],
        "submit": [
            *("after", "array", "array_limit", "as_json", "chain", "dependency", "dry_run", "follow", "grid", "local"),
            *("no_exclude", "output", "overrides", "raw", "recipe", "test_only"),
        ],
        "status": ["as_json", "interval", "runs", "watch"],
        "logs": ["attempt", "follow", "job", "node", "raw", "run", "tail"],
        "cancel": ["runs"],
        "resume": ["anyway", "as_json", "from_older", "local", "no_exclude", "options", "run"],
        "runs": ["as_json", "cluster", "launcher", "limit", "recipe", "since", "states"],
        "nodes": ["as_json", "cluster", "forgive"],
        "collect": ["as_json", "sinks", "words"],
        "measurements": [],
        "accuracy": ["anchors", "as_json", "calibration", "each", "files", "markdown", "plot"],
        "calibrate": ["accelerator", "as_json", "backend", "dry_run"],
        "explain-args": ["as_json", "fallback", "names", "run"],
        "doctor": [
            *("as_json", "container", "devices", "frameworks", "local", "message_mib", "network", "nodes", "python"),
            *("rehearsal", "repeats", "save"),
        ],
    }
