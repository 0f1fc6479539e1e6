"""What check and plan say of the order of the nodes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from llmlaunch.cluster.matrix import matrix_text
from support.command_line import CommandLine

ROOT = Path(__file__).resolve().parents[3]
RECIPE = """\
schema: 1
name: mine
model: llama3-8b
backend: megatron-lm
cluster: ./site.yaml
nodes: 4
training: {sequence_length: 8192, global_batch_size: 512, steps: 10}
data: {mock: true}
layout: {tensor: 8, pipeline: 2}
"""


def site(folder: Path, speeds: list[list[float]]) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    (folder / "site.yaml").write_text("base: h100-80gb-x8\nlinks: {matrix: links.json}\n")
    (folder / "links.json").write_text(matrix_text([f"n{i}" for i in range(len(speeds))], speeds))
    return recipe


def test_check_and_plan_say_what_the_order_is_worth_in_one_line_and_in_json(
    llmlaunch: CommandLine, tmp_path: Path
) -> None:
    # near: 0-3 and 1-2; SLURM's order has 0-1 and 2-3 in a ring
    near = ({0, 3}, {1, 2})
    recipe = site(tmp_path, [[40e9 if {i, j} in near else 10e9 for j in range(4)] for i in range(4)])
    for command in ("check", "plan"):
        done = llmlaunch(command, recipe)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("Placement:")]
        assert "saves about" in line
        assert "on the first 4 nodes of the measured matrix" in line
    plan = llmlaunch.json("check", recipe)
    jsonschema.validate(plan, json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text()))
    assert plan["placement"]["seconds"] < plan["placement"]["slurm_order_seconds"]
    assert plan["placement"]["nodes"] == 4
    assert llmlaunch.json("check", recipe) == plan


def test_an_even_network_is_said_to_gain_nothing_and_an_unknown_one_is_not_spoken_of(
    llmlaunch: CommandLine, tmp_path: Path
) -> None:
    recipe = site(tmp_path, [[10e9] * 4] * 4)
    assert "Placement: no order of the nodes was found to be faster" in llmlaunch("check", recipe).stdout
    (tmp_path / "site.yaml").write_text("base: h100-80gb-x8\n")
    assert "Placement" not in llmlaunch("check", recipe).stdout
    assert llmlaunch.json("check", recipe)["placement"] is None


def test_a_bad_matrix_is_one_message_with_its_line(llmlaunch: CommandLine, tmp_path: Path) -> None:
    recipe = site(tmp_path, [[10e9] * 4] * 4)
    path = tmp_path / "links.json"
    path.write_text(path.read_text().replace("10.0", "NaN", 1))
    done = llmlaunch("check", recipe, code=2)
    assert "links.json:5: gigabytes_per_second[0][1]: n0 to n1 is NaN" in done.stderr
