"""`llmlaunch qualify` here, for real: six small layouts trained on the CPU, one of them beyond its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_quickstart import RECIPE, llmlaunch, python_alone

WORDS = (
    RECIPE, "model={num_layers: 2, hidden_size: 256, ffn_hidden_size: 1024, num_attention_heads: 4, "
    "num_query_groups: 2, vocab_size: 256}",
    "cluster={base: cpu-x1, accelerator: {memory_gib: 0.75}}", "training.sequence_length=64", "training.steps=2",
)  # fmt: skip

pytestmark = pytest.mark.frameworks


def test_six_layouts_end_as_predicted_and_are_not_run_twice(tmp_path: Path) -> None:
    words = (*WORDS, f"python={python_alone(tmp_path)}")
    answer = json.loads(llmlaunch(tmp_path, "qualify", *words, "--local", "--json").stdout)
    assert (answer["complete"], answer["as_predicted"]) == (True, True)
    *fits, tight, dies = answer["layouts"]
    assert [layout["expectation"] for layout in answer["layouts"]] == [*["fits"] * 4, "tight", "dies"]
    for layout in (*fits, tight, dies):
        assert abs(layout["error"]) < 0.15
        assert layout["step_seconds"] > 0
    assert dies["overfull"]
    assert dies["peaks"]["resident"]["measured_bytes"] > dies["memory_bytes"]

    again = llmlaunch(tmp_path, "qualify", *words, "--local")
    assert "Qualified cpu-x1 with deepspeed" in again.stdout
    assert "resident peaks of deepspeed on cpu say nothing of a GPU" in again.stdout
    runs = json.loads(llmlaunch(tmp_path, "runs", "--json").stdout)["runs"]
    assert sorted(run["recipe"] for run in runs) == [f"qualify-cpu-x1-deepspeed-{number}" for number in range(1, 7)]
    checked = llmlaunch(tmp_path, "check", "-v", *words).stdout
    assert "Qualified on cpu-x1 with deepspeed on" in checked
