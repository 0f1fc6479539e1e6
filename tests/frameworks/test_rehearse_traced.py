"""`llmlaunch rehearse --on trace` on the gallery's dense Megatron recipes, with the real frameworks: the peak of the
512-GPU job's worst rank on this machine, beside the estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PEAK_TOLERANCE = 0.03
MOST_RESIDENT_BYTES = 4 * 2**30  # of the whole machine that a person may have
LONGEST_WAIT_SECONDS = 600
LASTING = ("parameters", "gradients", "optimizer_states")


def rehearsed(*words: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "llmlaunch", "rehearse", *words, "--on", "trace", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_WAIT_SECONDS, check=False)
    assert answer.stdout, answer.stderr
    return answer.returncode, json.loads(answer.stdout), answer.stderr


@pytest.mark.parametrize("recipe", ["llama3-8b", "llama3-70b"])
def test_the_worst_rank_of_a_dense_gallery_recipe_is_as_predicted(recipe: str) -> None:
    code, told, said = rehearsed(str(RECIPES / f"{recipe}.yaml"))
    assert (code, told["verdict"]) == (0, "safe"), said
    assert told["worst_pipeline_rank"] in [rank["pipeline_rank"] for rank in told["ranks"]]
    for rank in told["ranks"]:
        assert (rank["on"], rank["peak_kind"]) == ("trace", "allocated")
        assert rank["predicted_bytes"] == pytest.approx(rank["rehearsed_bytes"], rel=PEAK_TOLERANCE)
        assert rank["versions"]["megatron-core"].startswith("0.19.")
        assert 0 < rank["tracer_resident_bytes"] < MOST_RESIDENT_BYTES
        for name in LASTING:
            term = rank["terms"][name]
            assert term["rehearsed_bytes"] == pytest.approx(term["predicted_bytes"], abs=2**20)
        assert sum(term["rehearsed_bytes"] for term in rank["terms"].values()) == rank["rehearsed_bytes"]
    assert told["recorded"] is not None


def test_what_megatron_refuses_is_said_in_its_own_words() -> None:
    words = 'backend={name: megatron-lm, extra_args: ["--no-such-flag", "1"]}'
    command = [sys.executable, "-m", "llmlaunch", "rehearse", str(RECIPES / "llama3-8b.yaml"), words, "--on", "trace"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_WAIT_SECONDS, check=False)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "Megatron-LM refuses these arguments" in answer.stderr
    assert "--no-such-flag" in answer.stderr
    assert "Traceback" not in answer.stderr
