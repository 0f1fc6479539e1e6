"""Jobs that people reported keep their verdicts, and the layouts they pin their sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.app.planned_run import plan
from llmlaunch.units import GIB
from support.command_line import CommandLine

RECIPES = Path(__file__).resolve().parents[2] / "data" / "reported_recipes"
LEARNING_RATE = "training.learning_rate=1e-5"
WITHIN = 0.02


@pytest.mark.parametrize(
    ("name", "overrides", "verdict", "gib"),
    [
        pytest.param("s05_235b", (), "unsafe", 139.5, id="a mixture of 235B on A100s"),
        pytest.param("s12_q32", (), "safe", 76.6, id="32B on H200s, nothing recomputed"),
        pytest.param("s24", (), "safe", 45.9, id="32B at 32,768 tokens, all recomputed"),
        pytest.param("s34t", (LEARNING_RATE,), "safe", 50.7, id="adapters of 235B"),
    ],
)
def test_a_pinned_layout_is_judged_as_before(name: str, overrides: tuple[str, ...], verdict: str, gib: float) -> None:
    judged = plan(RECIPES / f"{name}.yaml", overrides).plan
    assert judged.verdict == verdict
    assert judged.device_bytes / GIB == pytest.approx(gib, rel=WITHIN)
    assert judged.fuller is None


def test_a_layout_that_is_left_open_stays_safe_and_roomy() -> None:
    chosen = plan(RECIPES / "s20_q30_h100.yaml").plan
    assert chosen.safe
    assert chosen.stated_risk is not None
    assert chosen.stated_risk <= 0.01


def test_states_on_the_host_are_fp32(llmlaunch: CommandLine) -> None:
    said = llmlaunch("check", RECIPES / "s04_100k.yaml", code=2).stderr
    assert "optimizer needs offload_optimizer: 0: on the host the states are fp32" in " ".join(said.split())
