"""The planner's choice beside NVIDIA's published layouts (docs/choices.md): at least as fast where theirs is safe, and
with the preference not far from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.published_layouts import (
    PricedLayout,
    Workload,
    compared,
    mean,
    priced,
    published_cells,
    workloads,
)
from support.soak import share

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "choices.md").read_text("utf-8")
WORKLOADS = workloads()
QUICK = share(  # seconds to search
    ("Llama 3 8B", "Llama 3 70B, fp8, 64 H100", "Llama 3 70B, nvfp4, 64 GB200"),
    ("Llama 3 8B",),
)


def test_there_are_dense_models_and_mixtures_on_three_generations() -> None:
    assert len(WORKLOADS) >= 12
    mixtures = [each for each in WORKLOADS if each.setting({}).recipe.model.moe is not None]
    assert len(mixtures) >= 3
    assert {"h100-80gb-x8", "b200-x8", "gb200-nvl72"} <= {each.cluster for each in WORKLOADS}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_published_layout_is_legal_and_the_page_has_its_row(workload: Workload) -> None:
    for published in workload.published:
        assert isinstance(priced(workload, published), PricedLayout), published
    assert f"| {' | '.join(published_cells(workload))} |" in PAGE, "run: python benchmarks/published_layouts.py --write"


def test_the_choice_is_as_fast_as_the_published_layout_and_near_it_with_the_preference() -> None:
    comparisons = []
    for workload in WORKLOADS:
        theirs = priced(workload, workload.published[0])
        if workload.name.startswith(tuple(QUICK)) and isinstance(theirs, PricedLayout) and not theirs.bytes_beyond:
            comparisons.append(compared(workload, theirs))
    assert len(comparisons) >= 4
    assert mean([max(each.slower(each.fastest) or 0.0, 0.0) for each in comparisons]) <= 0.005
    preferred = [max(each.slower(each.chosen) or 0.0, 0.0) for each in comparisons]
    assert mean(preferred) <= 0.015
    assert max(preferred) <= 0.04
