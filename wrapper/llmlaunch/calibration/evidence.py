"""Measured runs as evidence, and the bound that they give: how far beyond its prediction the next such run may need.

A run's score is how far it went beyond its prediction. There are two kinds, and one bound for both (`conformal_bound`):
the smallest number that so few runs exceed that (those that exceed it + 1) / (n + 1) is at most the risk. The next run
exceeds it with a probability of at most `risk`, whatever the scores' distribution, as long as it is exchangeable with
these n (Vovk et al. 2005; Lei et al. 2018, "Distribution-Free Predictive Inference for Regression", section 2;
Angelopoulos et al. 2024, "Conformal Risk Control", theorem 1). With fewer than 1/risk - 1 runs no finite bound holds,
and none is given.

**A ratio**, measured / predicted, is the score of a run of the store (`ratios.py`).

**A shortfall**, in bytes, is the score of the runs that are shipped with llmlaunch (`evidence.json`) and of those of
the store that join them. Part of what a prediction misses is as large on every card (a context, a communicator, a
library's workspace), part grows with the job (fragments, buffers nobody modelled), so shortfalls are compared in units
of `unit_bytes`: 1 GiB and a share of the predicted peak. A bound is a number of such units, and thus has a part in GiB
and a part in percent.

- A measured peak counts as if it had been planned right up to its limit.
- A run that died exceeds a bound that would have called its prediction safe on the very card it died on.
- A run known only to have fitted exceeds none. It counts where its prediction was above half of its card, because
  planners choose there; a small job on a large card would only dilute the rest.
- Runs of which less than 8 GiB was measured are left out: they say little of the jobs that fill a card.

A class is a backend, dense or mixture, and 16-bit or narrower products. A class with too few runs, or with runs of one
source only, is pooled wider, step by step, and the margin says so.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from llmlaunch.frameworks.argument import expands_segments
from llmlaunch.frameworks.recorded import TABLES
from llmlaunch.frameworks.registry import framework_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import GIB

FUJII_SHARE = 0.80  # of device memory is safe to use: Fujii et al., arXiv 2411.06465
TABLE = Path(__file__).parent / "evidence.json"  # `make evidence-table` writes it
UNIT_SHARE = 0.005  # of the predicted peak, in a unit of shortfall
ENOUGH = 2  # times the runs that a bound needs at all, so that not the single worst one decides
FEWEST_SOURCES = 2  # one source says nothing of how far sources lie apart
# Formulas of the trainers that a recipe can choose are held to traces of the real framework; those of the other
# backends among the shipped runs are read from source alone.
TRACED = frozenset(TABLES.values())
ADA = "8.9"
OWN = "this store"  # the source of its runs
LIVED, DIED, FITTED = "lived", "died", "fitted"


def runs_needed(risk: float) -> int:
    """Return the fewest runs that can bound `risk`: 1/risk - 1, rounded up."""
    return math.ceil(1 / exact_risk(risk) - 1)


def conformal_bound(scores: Sequence[float], risk: float, others: int = 0) -> float | None:
    """Return the smallest of `scores` that the next run exceeds with a probability of at most `risk`. `others` counts
    the runs that exceed no bound.

    Return None with fewer than `runs_needed(risk)` runs; infinity if so many died that the score in question is a
    death's; and minus infinity if so many are `others` that any bound holds.
    """
    exceeding = math.floor(exact_risk(risk) * (len(scores) + others + 1)) - 1
    if exceeding < 0:
        return None
    return sorted(scores)[len(scores) - 1 - exceeding] if exceeding < len(scores) else -math.inf


def no_bound_sentence(risk: float, runs: int, died: int = 0, holder: str = "the store") -> str:
    """Return why comparable runs give no bound at `risk`: there are too few, or too many of them died."""
    needed = runs_needed(risk)
    if runs < needed:
        return f"risk {risk:g} needs {needed} comparable runs, {holder} holds {runs}"
    return f"risk {risk:g} has no bound: {died} of the {runs} comparable runs in {holder} ran out of memory"


def exact_risk(risk: float) -> Fraction:
    """Return the risk as written: in binary, 100 x (1 - 0.01) is not 99."""
    return Fraction(str(risk))


@dataclass(frozen=True)
class JobClass:
    """What jobs are compared by. `backend` is a value of `frameworks.recorded.TABLES`; `narrow` says that linear layers
    multiply in 8 or 4 bits; `capability` is the compute capability of the card, None where it is not known.

    `whole_segments` says that torch's segments do not expand where those of the measured runs did. What that adds is
    known to be missing from their shortfalls (`margins.FRAGMENTS`)."""

    backend: str
    mixture: bool
    narrow: bool
    capability: str | None
    whole_segments: bool = False

    @property
    def generation(self) -> str | None:
        """The architecture of the card: its major capability; Ada's 8.9 is not Ampere's."""
        return None if self.capability is None or self.capability == ADA else self.capability.split(".")[0]

    @property
    def name(self) -> str:
        layers, bits = "mixture" if self.mixture else "dense", "below 16 bits" if self.narrow else "16 bits"
        return f"{self.backend}, {layers}, {bits}"

    def pools(self) -> tuple[tuple[str, tuple[object, ...]], ...]:
        """Return the classes to pool runs by, the narrowest first: the name and the key of each. Formulas err by
        backend, so it is given up after all else."""
        models = "mixture models" if self.mixture else "dense models"
        exact = f"{models} {'below 16 bits' if self.narrow else 'in 16 bits'}"
        traced = self.backend in TRACED
        others = f"runs of backends {'held' if traced else 'not held'} to traces"
        return (
            (f"{self.backend} runs of {exact}", (self.backend, self.mixture, self.narrow)),
            (f"{self.backend} runs of {models}", (self.backend, self.mixture)),
            (f"{self.backend} runs", (self.backend,)),
            (f"{others}, {exact}", (traced, self.mixture, self.narrow)),
            (f"{others}, {models}", (traced, self.mixture)),
            (others, (traced,)),
            ("runs of all backends", ()),
        )


def job_class(recipe: Recipe) -> JobClass:
    """Return the class of measured runs that the recipe's jobs are compared with."""
    name, training = framework_of(recipe).recorded_name(recipe), recipe.training
    return JobClass(
        backend=TABLES.get(name, name),
        mixture=recipe.model.moe is not None,
        narrow=training.numbers.narrow is not None,
        capability=recipe.cluster.accelerator.compute_capability,
        whole_segments=not expands_segments(recipe),
    )


@dataclass(frozen=True)
class EvidenceRun:
    """One configuration that ran, with the highest peak of its ranks and repeats. `shortfall_bytes` is what it needed
    beyond `predicted_bytes`, its device peak: negative if it needed less, for a death the least it needed (its card
    less the prediction), for a run that fitted the most."""

    id: str
    source: str
    job: JobClass
    outcome: str  # LIVED, DIED or FITTED
    predicted_bytes: int
    shortfall_bytes: int

    @property
    def units(self) -> float:
        return self.shortfall_bytes / unit_bytes(self.predicted_bytes)


def unit_bytes(predicted_bytes: float) -> float:
    """Return the unit in which shortfalls of predictions of that size are compared."""
    return GIB + UNIT_SHARE * predicted_bytes


@dataclass(frozen=True)
class EvidencePool:
    """The measured runs that a margin rests on: how many, how many `died`, and of how many `sources`. `name` says which
    they are, `widened` that the job's own class had too few. `shortfalls` are in units of `unit_bytes`, ascending, of
    all runs but those that fitted."""

    name: str
    runs: int
    died: int
    sources: int
    widened: bool
    shortfalls: tuple[float, ...]

    def units_at(self, risk: float) -> float:
        """Return the fewest units that must stay free for at most `risk`, never below 0. They are just above the
        shortfall that is the first not to be lost: a death is lost also where its card is filled exactly."""
        bound = conformal_bound(self.shortfalls, risk, self.runs - len(self.shortfalls))
        return math.inf if bound is None else max(math.nextafter(bound, math.inf), 0.0)

    def risk_of(self, units: float) -> float:
        """Return the risk of a run that has so many units free beyond its prediction."""
        beyond = len(self.shortfalls) - bisect.bisect_left(self.shortfalls, units)
        return min((beyond + 1) / (self.runs + 1), 1.0)

    @property
    def sentence(self) -> str:
        """How many runs of which kind these are, without a full stop."""
        dead = f", {self.died} of which died" if self.died else ""
        wider = " (its own class has too few)" if self.widened else ""
        return f"{self.runs} measured {self.name}{dead}{wider}"


def evidence_pool(
    job: JobClass, risk: float, without_source: str | None = None, own_runs: Sequence[EvidenceRun] = ()
) -> EvidencePool | None:
    """Return the runs that bound `risk` for jobs of a class, the narrowest pool of all shipped runs but those
    `without_source` and of `own_runs`; None where no run was measured on a card of its generation, or too few runs
    bound the risk."""
    runs = [run for run in (*shipped_runs(), *own_runs) if run.source != without_source]
    if job.generation is None or not any(run.job.generation == job.generation for run in runs):
        return None
    for step, (name, key) in enumerate(job.pools()):
        members = [run for run in runs if run.job.pools()[step][1] == key]
        sources = len({run.source for run in members})
        if len(members) < ENOUGH * runs_needed(risk) or sources < FEWEST_SOURCES:
            continue
        shortfalls = tuple(sorted(run.units for run in members if run.outcome != FITTED))
        died = sum(run.outcome == DIED for run in members)
        return EvidencePool(name, len(members), died, sources, step > 0, shortfalls)
    return None


@cache
def shipped_runs() -> tuple[EvidenceRun, ...]:
    """Return the measured runs that come with llmlaunch."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(
        EvidenceRun(name, source, JobClass(backend, mixture, narrow, capability), outcome, predicted, shortfall)
        for name, source, backend, mixture, narrow, capability, outcome, predicted, shortfall in content["runs"]
    )
