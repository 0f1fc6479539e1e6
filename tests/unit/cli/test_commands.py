"""The command line: results alone on stdout, one message and the right exit code for every mistake, nothing written."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from llmlaunch.app.gallery import gallery
from llmlaunch.assets import asset
from llmlaunch.cli.main import COMMANDS, GROUPS, load_command, main
from support.command_line import CommandLine
from support.json_schemas import validate
from support.recipes import recipe_text
from support.slurm_answers import SLURM_22_05

ROOT = Path(__file__).resolve().parents[3]
FEW = (  # some hundred layouts
    "{context: 1, micro_batch_size: 1, layers_by_stage: even, recompute: none, offload_modules: [], offload_layers: 0, "
    "offload_optimizer: 0, techniques: asked}"
)
GOOD = recipe_text(layout=FEW)


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that holds the recipe alone the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    return path


def assert_nothing_written() -> None:
    assert list(Path().iterdir()) == [Path("recipe.yaml")]


def changed(key: str, value: str) -> str:
    """GOOD with one line replaced."""
    lines = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in GOOD.splitlines()]
    assert lines != GOOD.splitlines()
    return "\n".join(lines) + "\n"


UNSAFE = "{tensor: 1, pipeline: 1, context: 1, micro_batch_size: 8, recompute: none, techniques: asked}"
BAD = [
    ("heads not divisible", changed("model", "{base: llama3-8b, num_attention_heads: 33, num_query_groups: 11}"), "33"),
    ("nodes that no count could be", changed("nodes", "auto").replace(FEW, "{data: 3}"), "batch"),
]


@pytest.mark.parametrize(("what", "text", "named"), BAD, ids=[case[0] for case in BAD])
def test_a_bad_recipe_is_one_message_and_exit_code_2(
    llmlaunch: CommandLine, recipe: Path, what: str, text: str, named: str
) -> None:
    recipe.write_text(text)
    answer = llmlaunch("check", "recipe.yaml", code=2)
    assert answer.stdout == ""
    assert "recipe.yaml" in answer.stderr
    assert named in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert_nothing_written()


def test_submit_and_plan_refuse_a_bad_recipe_as_check_does(llmlaunch: CommandLine, recipe: Path) -> None:
    recipe.write_text(BAD[0][1])
    refused = llmlaunch("check", "recipe.yaml", code=2)
    assert refused == llmlaunch("plan", "recipe.yaml", code=2) == llmlaunch("submit", "recipe.yaml", "--local", code=2)
    assert_nothing_written()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changed("layout", UNSAFE), ("no layout is safe", "pipeline rank")),
        (GOOD + "budget: {days: 0.0001}\n", ("of budget.days: 0.0001",)),
    ],
    ids=["nothing is safe", "the budget is not met"],
)
def test_a_plan_that_will_not_do_is_exit_code_3_and_nothing_is_written(
    llmlaunch: CommandLine, recipe: Path, text: str, said: tuple[str, ...]
) -> None:
    recipe.write_text(text)
    for command, *options in (("check",), ("plan",), ("submit", "--local"), ("render", "-o", "run")):
        error = llmlaunch(command, "recipe.yaml", *options, code=3).stderr
        assert all(part in error for part in said), error
        assert ("budget" in text) <= (len(error.strip().splitlines()) == 1)
    assert_nothing_written()


def test_json_is_the_result_alone_in_the_published_shape(llmlaunch: CommandLine) -> None:
    plan = llmlaunch.json("check", "recipe.yaml")
    shape = {"recipe", "verdict", "layout", "memory", "step_seconds", "tokens_per_second_per_gpu"}
    assert shape | {"searched", "refused", "alternatives"} <= set(plan)
    assert {"limit_bytes", "margin", "ranks", "host_bytes_per_node"} <= set(plan["memory"])
    for rank in plan["memory"]["ranks"]:
        assert sum(rank["terms"].values()) == rank["device_bytes"]
    more = llmlaunch.json("plan", "recipe.yaml")
    assert more.pop("neighbours") == []  # for which no search was left
    assert more == plan


@pytest.mark.usefixtures("all_advice")
def test_plan_shows_neighbours_refusals_and_the_page(llmlaunch: CommandLine, tmp_path: Path) -> None:
    answer = llmlaunch("plan", "-v", "recipe.yaml", "--html", "plan.html")
    for part in ("Ranked layouts", "Neighbours of this layout", "refused, each for the first reason"):
        assert part in answer.stdout
    assert "<html" in (tmp_path / "plan.html").read_text()
    plan = llmlaunch.json("plan", "recipe.yaml")
    validate(plan, json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text()))
    faster = plan["faster_without_preference"]  # shown wherever a plainer layout is chosen than the fastest
    fuller = plan["gave_way_for_headroom"]  # and a roomier one than the ranking's first says what that one was
    ranked = plan["step_seconds"] if fuller is None else fuller["step_seconds"]
    assert plan["step_seconds"] == pytest.approx(ranked * (1 + (fuller["gain"] if fuller else 0)), rel=1e-3)
    assert faster is None or faster["gain"] <= sum(habit["price"] for habit in faster["habits"]) + 1e-3


@pytest.mark.usefixtures("all_advice")
def test_a_pinned_layout_that_overflows_says_the_rank_the_term_and_a_change_that_works(llmlaunch: CommandLine) -> None:
    pins = f"layout={UNSAFE}"
    answer = llmlaunch("check", "recipe.yaml", pins, "--json", code=3)
    plan = json.loads(answer.stdout)
    assert "pipeline rank 0 needs" in answer.stderr
    assert "most of it" in answer.stderr
    assert plan["advice"] in answer.stderr
    overrides = [f"{key}={json.dumps(value)}" for key, value in plan["changes"].items()]
    llmlaunch("check", "recipe.yaml", pins, *overrides)


def test_nodes_may_be_chosen_in_every_command(llmlaunch: CommandLine, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(changed("nodes", "auto"))
    plan = llmlaunch.json("check", "recipe.yaml")
    nodes = plan["sizing"]["nodes"]
    assert [tried["refused"] is None for tried in plan["sizing"]["tried"]] == [False] * (nodes - 1) + [True]
    assert plan["job"]["steps"] == 10
    fixed = llmlaunch.json("check", "recipe.yaml", f"nodes={nodes}")
    assert fixed == {**plan, "sizing": None}
    text = llmlaunch("plan", "-v", "recipe.yaml").stdout
    assert f"nodes: auto: the smallest cluster that does has {nodes} node" in text
    assert f"#SBATCH --nodes={nodes}\n" in llmlaunch("submit", "recipe.yaml", "--dry-run", "--full").stdout
    llmlaunch("render", "recipe.yaml", "-o", "run")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["nodes"] == nodes
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == plan


def test_check_says_how_long_the_job_is(llmlaunch: CommandLine) -> None:
    job = ("check", "recipe.yaml", "training.tokens=300B", 'slurm.time="24:00:00"')
    screen, text = llmlaunch(*job).stdout, llmlaunch(*job, "-v").stdout
    assert " for 71,526 steps\n" in screen
    assert "Job: 71,526 steps, 300B tokens: " in text
    assert " GPU-hours\n" in text
    assert "Assumed: SLURM ends the job after 24 h 0 min (slurm.time)" in text


def test_a_profile_of_a_site_needs_a_site(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = llmlaunch("init", "--site", code=2)
    assert "no SLURM here (scontrol is not on PATH); run it on a login node of the cluster" in answer.stderr
    assert_nothing_written()
    assert "--partition belongs to --site" in llmlaunch("init", "--partition", "gpu", code=2).stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_a_command_fits_the_terminal_and_has_examples_that_it_takes(
    llmlaunch: CommandLine, tmp_path: Path, name: str
) -> None:
    for file in ("job.sbatch", "records.jsonl"):  # named in examples, where a file must exist
        (tmp_path / file).touch()
    lines = llmlaunch(name, "--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    examples = [line for line in lines if re.match(rf"  (eval \"\$\()?llmlaunch {name}\b", line)]
    assert examples
    for example in examples:
        words = shlex.split(re.split(r"\s{2,}|\)\"| >", example.strip().removeprefix('eval "$('))[0])
        load_command(name).make_context(name, words[2:])


def test_init_writes_a_recipe_and_never_over_a_file(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("llama3-70b", "quickstart"):  # what the tests of starters find to be the gallery's, meaning by meaning
        wrote = llmlaunch("init", name)
        assert wrote.stdout == f"Next: llmlaunch check {name}.yaml  # will it fit?\n"
        assert f"wrote {name}.yaml" in wrote.stderr
        assert ("no SLURM here (scontrol is not on PATH)" in wrote.stderr) == (name == "llama3-70b")
    written = Path("quickstart.yaml").read_bytes()
    again = llmlaunch("init", "quickstart", code=2)
    assert "left as it is" in again.stderr
    assert Path("quickstart.yaml").read_bytes() == written
    assert "no recipe named" in llmlaunch("init", "nonsense", code=2).stderr
    assert "--json belongs to --list" in llmlaunch("init", "quickstart", "--json", code=2).stderr


def test_init_lays_the_schema_of_its_first_line_beside_and_leaves_another_one(
    llmlaunch: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    first = llmlaunch("init", "quickstart", "-o", "mine/a.yaml").stderr
    assert "and mine/llmlaunch.schema.json for your editor" in first
    schema = tmp_path / "mine" / "llmlaunch.schema.json"
    assert schema.read_text() == llmlaunch("schema").stdout
    assert llmlaunch("init", "quickstart", "-o", "mine/b.yaml").stderr == "wrote mine/b.yaml\n"
    schema.write_text("{}")
    third = llmlaunch("init", "quickstart", "-o", "mine/c.yaml").stderr
    assert "`llmlaunch schema -o mine/llmlaunch.schema.json` replaces it" in third
    assert schema.read_text() == "{}"


def put_slurm(put_commands: Callable[..., Path], folder: Path) -> None:
    """A SLURM 22.05 that says what it has, and nothing else."""
    for name in ("config", "partitions", "nodes"):
        (folder / name).write_text(getattr(SLURM_22_05, name))
    answers = f'case "$2" in config) cat {folder}/config;; partition) cat {folder}/partitions;; '
    put_commands(scontrol=f"{answers}node) cat {folder}/nodes;; esac\n", srun="", sacctmgr="")


def test_init_fills_in_what_slurm_says_and_goes_on_where_it_is_silent(
    llmlaunch: CommandLine, tmp_path: Path, put_commands: Callable[..., Path]
) -> None:
    put_slurm(put_commands, tmp_path)
    llmlaunch("init", "llama3-8b", "-o", "filled.yaml")
    assert "\n  partition: train\n" in Path("filled.yaml").read_text()
    put_commands(scontrol="echo 'Unable to contact slurm controller' >&2; exit 1\n")
    silent = llmlaunch("init", "llama3-8b", "-o", "silent.yaml")
    assert "warning: SLURM does not answer (" in silent.stderr
    assert "partition and account are left for you to fill in" in silent.stderr
    assert "\n  # partition: gpu\n" in Path("silent.yaml").read_text()


def test_a_drafted_profile_names_its_schema_too(
    llmlaunch: CommandLine, tmp_path: Path, put_commands: Callable[..., Path]
) -> None:
    put_slurm(put_commands, tmp_path)
    drafted = llmlaunch("init", "--site", "ours")
    assert drafted.stdout.startswith("Next: llmlaunch init --list")
    text = Path("ours.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=llmlaunch-cluster.schema.json\n# Cluster llmlaunch")
    schema = json.loads(Path("llmlaunch-cluster.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(text))


def test_the_gallery_is_listed_with_what_each_recipe_is_for(llmlaunch: CommandLine) -> None:
    listed = llmlaunch("init", "--list").stdout.splitlines()
    assert max(map(len, listed)) <= 80
    assert listed[0].split() == ["recipe", "model", "nodes", "x", "GPUs", "backend", "tokens"]
    rows = {line.split()[0]: line.split()[1:] for line in listed[1:] if line}
    assert rows["llama3-8b"] == ["8.0B", "4x8", "h100-80gb", "megatron-lm", "8,192"]
    assert listed[-2].startswith("Next: llmlaunch init quickstart")
    recipes = llmlaunch.json("init", "--list")["recipes"]
    assert [recipe["name"] for recipe in recipes] == [name for name in rows if name in gallery()]
    assert {recipe["name"] for recipe in recipes} == set(gallery())
    assert recipes[0]["about"].startswith("The whole way on one machine")


def test_dry_run_shows_what_render_writes_and_writes_nothing(llmlaunch: CommandLine, tmp_path: Path) -> None:
    shown = llmlaunch("submit", "recipe.yaml", "--dry-run", "--full").stdout
    assert "#SBATCH --nodes=4" in shown
    assert "--tensor-model-parallel-size" in shown
    assert_nothing_written()
    llmlaunch("render", "recipe.yaml", "-o", "run")
    assert (tmp_path / "run" / "job.sbatch").read_text() in shown
    assert (tmp_path / "run" / "command.txt").read_text() in shown


def test_local_runs_refuse_several_nodes_and_write_nothing(llmlaunch: CommandLine, tmp_path: Path) -> None:
    answer = llmlaunch("submit", asset("recipes", "quickstart.yaml"), "nodes=2", "--local", "-o", "run", code=2)
    assert "this machine is one" in answer.stderr
    assert not (tmp_path / "run").exists()


def test_a_bug_of_ours_is_a_traceback_with_a_hint_to_report_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("llmlaunch.cli.planning.plan", broken)
    monkeypatch.setattr(sys, "argv", ["llmlaunch", "check", "recipe.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    stderr = capsys.readouterr().err
    assert end.value.code == 1
    assert "Traceback" in stderr
    assert "Please report it" in stderr


def test_the_command_line_is_frozen_a_new_option_is_a_decision() -> None:
    options = {name: sorted(p.name or "" for p in load_command(name).params) for name in COMMANDS}
    assert options == {
        "init": ["as_json", "cluster", "names", "number", "output", "partition", "settings", "show", "site", "source"],
        "check": [
            *("as_json", "cluster", "megatron_args", "number", "overrides", "recipe", "replan", "settings", "verbose")],
        "plan": ["as_json", "cluster", "html", "locks", "number", "overrides", "recipe", "settings", "verbose"],
        "compare": ["as_json", "cluster", "clusters", "nodes", "number", "overrides", "prices", "recipe", "settings"],
        "diff": ["as_json", "cluster", "first", "number", "second", "settings"],
        "render": ["as_json", "output", "overrides", "recipe", "replan"],
        "rehearse": ["as_json", "install_frameworks", "output", "overrides", "place", "rank", "recipe"],
        "schema": ["name", "output"],
        "submit": [
            *("after", "array", "array_limit", "as_json", "chain", "cluster", "dependency", "dry_run", "follow"),
            *("full", "grid", "local", "no_exclude", "number", "on", "output", "overrides", "raw", "recipe", "replan"),
            *("settings", "test_only")],
        "observe": ["archive", "command", "directory", "interval"],
        "status": ["as_json", "interval", "on", "runs", "watch"],
        "report": ["as_json", "html", "on", "run"],
        "logs": ["attempt", "follow", "job", "node", "on", "raw", "run", "tail"],
        "cancel": ["on", "runs"],
        "resume": ["anyway", "as_json", "from_older", "local", "no_exclude", "on", "options", "run"],
        "runs": ["as_json", "cluster", "file", "launcher", "limit", "on", "recipe", "since", "states"],
        "nodes": ["as_json", "cluster", "forgive"],
        "collect": ["as_json", "recipe", "words"],
        "measurements": [], "accuracy": ["as_json", "each", "files"],
        "calibrate": ["accelerator", "as_json", "backend", "dry_run"],
        "explain-args": ["as_json", "fallback", "names", "run"],
        "doctor": [*("as_json", "container", "devices", "frameworks", "local", "message_mib", "network", "nodes"),
            *("python", "rehearsal", "repeats", "save")],
        "completion": ["shell"],
    }  # fmt: skip


def test_the_help_groups_the_commands_and_every_line_fits_the_terminal(llmlaunch: CommandLine) -> None:
    grouped = [name for names in GROUPS.values() for name in names if name in COMMANDS]
    assert sorted(grouped) == sorted(COMMANDS)
    lines = llmlaunch("--help").stdout.splitlines()
    assert [f"{title}:" for title in GROUPS] == [line for line in lines if line[:-1] in GROUPS]
    assert max(map(len, lines)) < 80
    for name, (_, summary) in COMMANDS.items():
        assert any(line.split() == [name, *summary.split()] for line in lines), f"{name}: {summary} takes two lines"


QUICKSTART = str(asset("recipes", "quickstart.yaml"))
LONG = "x" * 5000
DISAGREE = (
    "nodes=-1", "slurm={tiem: 1}", "setup=['echo \"$(']", "container={image: a.sif, mounts: ['/a,b:/c']}",
    "backend.extra_args=[--nope]", "layout={tensor: 3}", "what_if={weight_versions: 2}",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("measurements", "export", LONG), ("status", "~nobody-here"), ("check", LONG),
        ("accuracy", "deep.json"), ("measurements", "import", "deep.json"), ("runs", "--limit", "9" * 20),
        ("check", "binary.yaml"), ("check", "loop"), ("render", QUICKSTART, "-o", "loop"),
        ("logs", "folder", "--tail", "-1"), ("plan", QUICKSTART, "--html", "folder"), ("resume", ""), ("cancel", "/"),
    ],
)  # fmt: skip
def test_an_odd_command_line_is_one_message(llmlaunch: CommandLine, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000 + "\n")
    (tmp_path / "binary.yaml").write_bytes(b"\x80\xff\x00")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    assert llmlaunch(*arguments, code=2).stderr.lower().count("error: ") == 1


@pytest.mark.parametrize("override", DISAGREE)
def test_check_submit_and_render_agree(llmlaunch: CommandLine, override: str) -> None:
    codes, warnings = [], []
    for command, *options in (("check",), ("submit", "--dry-run"), ("render", "-o", "run")):
        stderr = llmlaunch(command, QUICKSTART, override, *options, code=(0, 2, 3)).stderr
        codes.append(llmlaunch.code)
        warnings.append([line for line in stderr.splitlines() if line.startswith("warning: ")])
    if override.startswith("what_if"):  # priced by check; no backend runs it
        assert codes == [0, 2, 2]
    else:
        assert len(set(codes)) == 1, codes
    assert warnings[0] == warnings[1]
