"""What check and plan say of the order of the nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema

from llmlaunch.cluster.matrix import matrix_text

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


def llmlaunch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmlaunch", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def site(folder: Path, speeds: list[list[float]]) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "site.yaml").write_text("base: h100-80gb-x8\nlinks: {matrix: links.json}\n")
    (folder / "links.json").write_text(matrix_text([f"n{i}" for i in range(len(speeds))], speeds))


def test_check_and_plan_say_what_the_order_is_worth_in_one_line_and_in_json(tmp_path: Path) -> None:
    # near: 0-3 and 1-2; SLURM's order has 0-1 and 2-3 in a ring
    near = ({0, 3}, {1, 2})
    site(tmp_path, [[40e9 if {i, j} in near else 10e9 for j in range(4)] for i in range(4)])
    for command in ("check", "plan"):
        done = llmlaunch(tmp_path, command, "recipe.yaml")
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("Placement:")]
        assert "saves about" in line
        assert "on the first 4 nodes of the measured matrix" in line
    told = json.loads(llmlaunch(tmp_path, "check", "recipe.yaml", "--json").stdout)
    jsonschema.validate(told, json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text()))
    assert told["placement"]["seconds"] < told["placement"]["slurm_order_seconds"]
    assert told["placement"]["nodes"] == 4
    again = json.loads(llmlaunch(tmp_path, "check", "recipe.yaml", "--json").stdout)
    assert again == told


def test_an_even_network_is_said_to_gain_nothing_and_an_unknown_one_is_not_spoken_of(tmp_path: Path) -> None:
    site(tmp_path, [[10e9] * 4] * 4)
    assert (
        "Placement: no order of the nodes was found to be faster" in llmlaunch(tmp_path, "check", "recipe.yaml").stdout
    )
    (tmp_path / "site.yaml").write_text("base: h100-80gb-x8\n")
    assert "Placement" not in llmlaunch(tmp_path, "check", "recipe.yaml").stdout
    assert json.loads(llmlaunch(tmp_path, "check", "recipe.yaml", "--json").stdout)["placement"] is None


def test_a_bad_matrix_is_one_message_with_its_line(tmp_path: Path) -> None:
    site(tmp_path, [[10e9] * 4] * 4)
    path = tmp_path / "links.json"
    path.write_text(path.read_text().replace("10.0", "NaN", 1))
    done = llmlaunch(tmp_path, "check", "recipe.yaml")
    assert done.returncode == 2
    assert "links.json:5: gigabytes_per_second[0][1]: n0 to n1 is NaN" in done.stderr
    assert "Traceback" not in done.stderr
