"""`check`, `plan`, `render` and `explain-args`: what is said of versions, fallbacks, placement, each argument."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.app.planned_run import plan as plan_of_file
from llmlaunch.assets import asset
from llmlaunch.cluster.matrix import matrix_text
from support.command_line import CommandLine
from support.json_schemas import validate
from support.recipes import recipe_text

ROOT = Path(__file__).resolve().parents[3]
DEEPSPEED = str(asset("recipes", "llama2-7b-deepspeed.yaml"))
QUICKSTART = str(asset("recipes", "quickstart.yaml"))
ASKED = "layout={zero_stage: [2, 3], context: 1, recompute: none, offload_optimizer: 0, techniques: asked}"
SAVING = ("training.checkpoint_path=/ckpt", "training.save_interval=10", ASKED)
RECIPE = recipe_text(layout="{tensor: 1, pipeline: 1, context: 1, micro_batch_size: 1, techniques: asked}")
MAIN = 'MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = ""\n'
COMMANDS = (
    ("check",),
    ("render", "-o", "out"),
    ("submit", "--dry-run", "--local"),
    ("submit", "training.steps=10,20", "--dry-run", "--local"),
)


def test_a_plan_with_fallbacks_has_the_published_shape(llmlaunch: CommandLine) -> None:
    schema = json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text())
    for policy, count in (("stop", None), ("fallback", 2)):
        plan = llmlaunch.json("check", DEEPSPEED, ASKED, f"on_oom={policy}")
        validate(plan, schema)
        assert (None if plan["fallbacks"] is None else len(plan["fallbacks"])) == count


def test_each_fallback_has_a_line_with_what_becomes_of_checkpoints(llmlaunch: CommandLine) -> None:
    lines = llmlaunch("check", "-v", DEEPSPEED, *SAVING, "on_oom={layouts: 2}").stdout.splitlines()
    at = lines.index("If a device runs out of memory, the same job continues with")
    assert [line.split()[0] for line in lines[at + 2 : at + 4]] == ["1.", "2."]
    assert lines[at + 2].endswith("before the first checkpoint only: cannot load one")
    assert lines[at + 3].endswith("from a checkpoint of the planned layout")


def test_fewer_fallbacks_than_asked_for_are_warned_of_in_rendering(llmlaunch: CommandLine, tmp_path: Path) -> None:
    fewer = "of 8 layouts; no other has "
    few = ("on_oom={layouts: 8}", ASKED.replace("[2, 3]", "3"))
    assert fewer in llmlaunch("check", "-v", DEEPSPEED, *few).stdout
    err = llmlaunch("render", DEEPSPEED, *few, "-o", tmp_path / "run").stderr
    assert err.startswith("warning: on_oom: ")
    assert fewer in err


def test_what_is_not_safe_has_no_fallback(llmlaunch: CommandLine) -> None:
    unsafe = ("cluster=cpu-x1", "memory.limit=0.02")
    assert llmlaunch.json("check", QUICKSTART, "on_oom=fallback", *unsafe, code=3)["fallbacks"] is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text(MAIN)
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments[:2]))
def test_an_unknown_version_is_warned_of_once(llmlaunch: CommandLine, arguments: tuple[str, ...]) -> None:
    done = llmlaunch(arguments[0], "recipe.yaml", *arguments[1:])
    assert done.stderr.count("warning: Megatron core 0.20.0 is none of those llmlaunch knows (0.16, 0.19)") == 1
    assert "0.20.0 is none" not in done.stdout


def test_the_version_is_recorded_with_the_run(llmlaunch: CommandLine, folder: Path) -> None:
    llmlaunch("render", "recipe.yaml", "-o", "out")
    assert json.loads((folder / "out" / "run.json").read_text())["measurement"]["backend_version"] == "0.20.0"
    assert "Assumed: Megatron core 0.20.0, as" in llmlaunch("check", "-v", "recipe.yaml").stdout


@pytest.mark.usefixtures("folder")
def test_a_strange_flag_of_ones_own_is_noted_where_the_job_is_rendered(llmlaunch: CommandLine) -> None:
    own = "backend={name: megatron-lm, extra_args: [--of-my-fork], neutral_args: [--of-my-fork]}"
    note = "note: backend.extra_args: --of-my-fork is no flag of Megatron core 0.19"
    assert llmlaunch("render", "recipe.yaml", own, "-o", "out").stderr.count(note) == 1


def site(folder: Path, speeds: list[list[float]]) -> Path:
    recipe = folder / "recipe.yaml"
    pins = "layout: {tensor: 8, pipeline: 2, context: 1, micro_batch_size: 1, layers_by_stage: even, techniques: asked}"
    recipe.write_text(RECIPE.replace("h100-80gb-x8", "./site.yaml").replace(RECIPE.splitlines()[-1], pins))
    (folder / "site.yaml").write_text("base: h100-80gb-x8\nlinks: {matrix: links.json}\n")
    (folder / "links.json").write_text(matrix_text([f"n{i}" for i in range(len(speeds))], speeds))
    return recipe


def test_check_says_what_the_order_is_worth_in_one_line_and_in_json(llmlaunch: CommandLine, tmp_path: Path) -> None:
    # near: 0-3 and 1-2; SLURM's order has 0-1 and 2-3 in a ring
    near = ({0, 3}, {1, 2})
    recipe = site(tmp_path, [[40e9 if {i, j} in near else 10e9 for j in range(4)] for i in range(4)])
    (line,) = [line for line in llmlaunch("check", "-v", recipe).stdout.splitlines() if line.startswith("Placement:")]
    assert "saves about" in line
    assert "on the first 4 nodes of the measured matrix" in line
    plan = llmlaunch.json("check", recipe)
    validate(plan, json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text()))
    assert plan["placement"]["seconds"] < plan["placement"]["slurm_order_seconds"]
    assert plan["placement"]["nodes"] == 4


def test_an_even_network_is_said_to_gain_nothing_and_an_unknown_one_is_not_spoken_of(
    llmlaunch: CommandLine, tmp_path: Path
) -> None:
    recipe = site(tmp_path, [[10e9] * 4] * 4)
    assert "Placement: no order of the nodes was found to be faster" in llmlaunch("check", "-v", recipe).stdout
    (tmp_path / "site.yaml").write_text("base: h100-80gb-x8\n")
    assert "Placement" not in llmlaunch("check", "-v", recipe).stdout
    assert llmlaunch.json("check", recipe)["placement"] is None


def test_a_bad_matrix_is_one_message_with_its_place(llmlaunch: CommandLine, tmp_path: Path) -> None:
    recipe = site(tmp_path, [[10e9] * 4] * 4)
    path = tmp_path / "links.json"
    path.write_text(path.read_text().replace("10.0", "NaN", 1))
    done = llmlaunch("check", recipe, code=2)
    assert "links.json: gigabytes_per_second[0][1]: n0 to n1 is NaN" in done.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    plan_of_file(asset("recipes", "llama3-8b.yaml"), ["layout={tensor: 2, pipeline: 1, techniques: asked}"]).write(
        folder, print
    )
    return folder


def test_each_argument_is_said_to_come_from_somewhere(llmlaunch: CommandLine, run_dir: Path) -> None:
    stdout = llmlaunch("explain-args", run_dir).stdout
    assert stdout.startswith("program: $MEGATRON_LM_PATH/pretrain_gpt.py\n")
    lines = stdout.splitlines()
    (length,) = [line for line in lines if line.startswith("  --seq-length 8192 ")]
    assert length.split("  ")[-1].strip() == "training.sequence_length: 8192 (recipe.yaml:9)"
    assert {"command.txt: arguments", "run.json: variables", "job.sbatch: directives"} <= set(lines)


def test_one_argument_alone_and_as_json(llmlaunch: CommandLine, run_dir: Path) -> None:
    (entry,) = llmlaunch.json("explain-args", run_dir, "lr")["entries"]
    assert entry["name"] == "--lr"
    assert entry["from"][0]["key"] == "training.learning_rate"


def test_mistakes_about_arguments_are_one_line(llmlaunch: CommandLine, run_dir: Path, tmp_path: Path) -> None:
    for arguments, wrong in (
        ((run_dir, "no-such-flag"), "no-such-flag: nothing of that name is rendered"),
        ((tmp_path,), "holds no arguments.json"),
        ((run_dir, "--fallback", "3"), "fallback/3: holds no arguments.json"),
    ):
        assert wrong in llmlaunch("explain-args", *arguments, code=2).stderr
