"""`llmlaunch compare`: each cell is what `check` says of it, ranked, and nothing is skipped in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import CommandLine
from support.json_schemas import validate
from support.recipes import recipe_text

SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "schemas"
PINS = "{pipeline: 1, context: 1, micro_batch_size: 1, recompute: full, techniques: asked}"
LARGE = PINS.replace("pipeline", "tensor: 1, pipeline").replace("size: 1", "size: 4").replace("full", "none")
TWO = ("--clusters", "h100-80gb-x8,b200-x8")


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose search is short, in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(layout=PINS))
    return path


def test_each_cell_is_what_check_says_and_the_fastest_comes_first(llmlaunch: CommandLine) -> None:
    prices = ("--price", "b200-x8=5,h100-80gb-x8=2.5")
    result = llmlaunch.json("compare", "recipe.yaml", *TWO, "--nodes", "1,4", *prices)
    schema = json.loads((SCHEMAS / "compare.schema.json").read_text())
    validate(result, schema)
    cells = result["cells"]
    assert {(cell["cluster"], cell["nodes"]) for cell in cells} == {
        (cluster, nodes) for cluster in ("h100-80gb-x8", "b200-x8") for nodes in (1, 4)
    }
    for cell in cells:
        words = (f"cluster={cell['cluster']}", f"nodes={cell['nodes']}")
        plan = llmlaunch.json("check", "recipe.yaml", *words, code=0 if cell["refused"] is None else 3)
        plan.pop("hints", None)
        assert cell["check"] == plan
        assert cell["days"] == plan["job"]["seconds"] / 86400
        assert cell["usd"] == plan["job"]["gpu_hours"] * (5 if cell["cluster"] == "b200-x8" else 2.5)
    able = [cell for cell in cells if cell["refused"] is None]
    assert able == cells[: len(able)]
    assert [cell["days"] for cell in able] == sorted(cell["days"] for cell in able)
    for figure, place in result["best"].items():
        assert cells[place][figure] == min(cell[figure] for cell in able)


def test_the_text_is_80_columns_with_why_others_may_not_run(llmlaunch: CommandLine, recipe: Path) -> None:
    recipe.write_text(recipe_text(layout=LARGE))
    answer = llmlaunch("compare", "recipe.yaml", "--clusters", "a100-40gb-x8,b200-x8,mi355x-x8", "--nodes", "3,4")
    assert max(map(len, answer.stdout.splitlines())) <= 80
    text = " ".join(answer.stdout.split())
    assert "24 devices cannot be split" in text
    assert "training.global_batch_size: 512 evenly" in text
    assert "a100-40gb-x8 x 4: unsafe: pipeline rank 0 needs" in text
    assert "b200-x8" in answer.stdout.split("May not run")[0]
    assert text.count("checked, not rendered: safe (risk not known): TP1") == 1  # no job is written for AMD's GPUs


def test_a_budget_divides_them_and_none_within_it_is_exit_code_3(llmlaunch: CommandLine) -> None:
    hours = [cell["days"] for cell in llmlaunch.json("compare", "recipe.yaml", *TWO)["cells"]]
    between = f"budget.days={sum(hours) / 2}"
    assert "Beyond the budget" in llmlaunch("compare", "recipe.yaml", *TWO, between).stdout
    nothing = llmlaunch("compare", "recipe.yaml", *TWO, f"budget.days={min(hours) / 2}", code=3)
    assert "may run on none of h100-80gb-x8, b200-x8" in nothing.stderr


def test_auto_is_the_number_of_nodes_that_check_chooses(llmlaunch: CommandLine) -> None:
    result = llmlaunch.json("compare", "recipe.yaml", "--clusters", "b200-x8", "--nodes", "auto")
    chosen = llmlaunch.json("check", "recipe.yaml", "cluster=b200-x8", "nodes=auto")["sizing"]["nodes"]
    assert [cell["nodes"] for cell in result["cells"]] == [chosen]


def test_a_price_of_the_profile_holds_unless_another_is_given(llmlaunch: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("base: b200-x8\nusd_per_gpu_hour: 3\n")
    for prices, price in (((), 3.0), (("--price", "ours.yaml=4"), 4.0)):
        (cell,) = llmlaunch.json("compare", "recipe.yaml", "--clusters", "ours.yaml", *prices)["cells"]
        assert (cell["usd_per_gpu_hour"], cell["usd"]) == (price, price * cell["gpu_hours"])
    (cell,) = llmlaunch.json("compare", "recipe.yaml", "--clusters", "b200-x8")["cells"]
    assert cell["usd"] is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--clusters", "h900-x8"), "h900-x8"),
        (("--clusters", ","), "--clusters"),
        ((*TWO, "--nodes", "four"), "--nodes four"),
        ((*TWO, "--nodes", "0"), "--nodes 0"),
        ((*TWO, "--price", "b200-x8"), "--price b200-x8"),
        ((*TWO, "--price", "b200-x8=nan"), "--price b200-x8=nan"),
        ((*TWO, "--price", "a100-40gb-x8=2"), "--price a100-40gb-x8"),
        ((*TWO, "training.stepz=3"), "stepz"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(llmlaunch: CommandLine, options: tuple[str, ...], named: str) -> None:
    answer = llmlaunch("compare", "recipe.yaml", *options, code=2)
    assert named in answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1
