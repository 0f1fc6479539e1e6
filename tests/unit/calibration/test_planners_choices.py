"""Sites whose runs a planner chose: fast layouts predicted to fit, which of all that fit are those that need more than
predicted. What is learned from them covers the choices it leads to."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import numpy as np

from llmlaunch.calibration.cases import Prediction, predict
from llmlaunch.calibration.learning import learn
from llmlaunch.calibration.margins import RULE
from llmlaunch.calibration.pool import gather, pools
from llmlaunch.calibration.records import clusters_by_gpu
from llmlaunch.memory.correction import NO_CORRECTION, Correction
from support.hidden_bias import LAYOUTS, MODELS, configuration
from support.measured_runs import CARD

SITES, RISK = 12, 0.1
BIAS, SPREAD = 0.05, 0.04  # of a layout's true need over its prediction
Option = tuple[dict[str, Any], Prediction]


@cache
def jobs() -> list[list[Option]]:
    """Each with all its layouts."""
    every = [[configuration(m, layout, n) for layout in LAYOUTS] for m in MODELS for n in range(1024, 8193, 512)]
    predictions = iter(predict([record for job in every for record in job]))
    found = [[(record, next(predictions)) for record in job] for job in every]
    return [[(record, one) for record, one in job if isinstance(one, Prediction)] for job in found]


def predicted(one: Prediction, correction: Correction = NO_CORRECTION) -> float:
    outside = np.maximum(one.outside + correction.outside_bytes, 0.0)
    return float((one.reserved * (1.0 + correction.torch_share) + outside).max())


class Site:
    """Every layout truly needs a multiple of its prediction that nobody knows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.factors = [[self.rng.lognormvariate(math.log1p(BIAS), SPREAD) for _ in job] for job in jobs()]
        self.ran: list[dict[str, Any]] = []

    def need(self, job: int, option: int) -> float:
        return predicted(jobs()[job][option][1]) * self.factors[job][option]

    def choice(self, job: int, limit: float, correction: Correction = NO_CORRECTION) -> int | None:
        """Of what is predicted to fit, the layout that truly holds most: what trades memory for speed is fastest."""
        fits = [i for i, (_, one) in enumerate(jobs()[job]) if predicted(one, correction) <= limit]
        return max(fits, key=lambda i: self.need(job, i), default=None)

    def run(self, job: int, option: int | None) -> None:
        if option is None:
            return
        need, record = round(self.need(job, option)), jobs()[job][option][0]
        said = {"id": f"run-{len(self.ran)}", "run_state": "succeeded", "peak_bytes": need}
        if need > CARD:
            said |= {"run_state": "failed", "peak_kind": "oom", "peak_bytes": None}
        self.ran.append({**record, **said})

    def small_one(self, job: int) -> int | None:
        """Somebody's try far from the limit."""
        small = [i for i, (_, one) in enumerate(jobs()[job]) if predicted(one) < 0.3 * CARD]
        return self.rng.choice(small) if small else None


def test_the_next_choices_of_a_planner_are_covered_at_the_risk() -> None:
    covered, trials = 0, 0
    for seed in range(SITES):
        site = Site(seed)
        order = list(range(len(jobs())))
        site.rng.shuffle(order)
        for job in order[:30]:
            site.run(job, site.small_one(job))
        for job in order[:45]:
            site.run(job, site.choice(job, RULE * CARD))
        (pool,), _ = pools(gather(site.ran).configurations, clusters_by_gpu())
        found = learn(pool, None, 1.8e9, "0.1.0", "e" * 64).calibration
        assert found is not None
        bound = next(one for one in found.after.bounds if one.risk == RISK).worse
        assert bound is not None
        for job in order[45:]:
            option = site.choice(job, CARD / max(bound, 1.0), found.correction)
            if option is not None:
                covered += site.need(job, option) <= bound * predicted(jobs()[job][option][1], found.correction)
                trials += 1
    assert trials > SITES * 30
    assert covered / trials >= 1 - RISK - 3 * (RISK * (1 - RISK) / trials) ** 0.5
