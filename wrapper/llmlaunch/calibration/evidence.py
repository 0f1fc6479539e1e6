"""Measured runs as evidence, and the bound that they give: how far the next run may exceed its prediction.

The score of a run is how far it exceeded its prediction. There are two kinds of score, and one bound for both
(`conformal_bound`): the smallest score such that (number of runs above it + 1) / (n + 1) is at most the risk. The next
run exceeds it with a probability of at most `risk`, whatever the distribution of the scores, as long as it is
exchangeable with these n (Vovk et al. 2005; Lei et al. 2018, "Distribution-Free Predictive Inference for Regression",
section 2; Angelopoulos et al. 2024, "Conformal Risk Control", theorem 1). With fewer than 1/risk - 1 runs no finite
bound exists, and none is given.

**A ratio**, measured / predicted, is the score of a run in the store (`ratios.py`).

**A shortfall**, in bytes, is the score of the runs shipped with llmlaunch (`evidence.json`) and of the runs in the
store that join them. Part of what a prediction misses is equally large on every card (a context, a communicator, a
library's workspace), and part grows with the job (fragments, buffers that are not modelled). Shortfalls are therefore
compared in units of `unit_bytes`: 1 GiB plus a share of the predicted peak. A bound is a number of such units, so it
has a part in GiB and a part in percent.

- A measured peak counts as if it had been planned right up to its limit.
- A run that ran out of memory exceeds any bound that would have called its prediction safe on the same card.
- A run that is only known to have fitted exceeds no bound. It counts if its prediction was above half of its card,
  because planners choose there; a small job on a large card would only dilute the others.
- Runs with a measured peak below 8 GiB are left out: they say little about jobs that fill a card.

A class consists of a backend, dense or mixture layers, and products in 16 bits or narrower. If a class has too few
runs, or runs from one source only, it is pooled with wider classes step by step, and the margin says so.
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
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.frameworks.recorded import TABLES
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import GIB

FUJII_SHARE = 0.80  # of device memory is safe to use: Fujii et al., arXiv 2411.06465
TABLE = Path(__file__).parent / "evidence.json"  # `make evidence-table` writes it
UNIT_SHARE = 0.005  # of the predicted peak, in a unit of shortfall
ENOUGH = 2  # times the runs that a bound needs, so that the single worst run does not decide
FEWEST_SOURCES = 2  # one source does not show how much sources differ
# The formulas of the trainers that a recipe can choose are checked against traces of the real framework. Those of the
# other backends among the shipped runs are derived from source code only.
TRACED = frozenset(TABLES.values())
ADA = "8.9"
OWN = "this store"  # the source of runs in the store
LIVED, DIED, FITTED = "lived", "died", "fitted"


def runs_needed(risk: float) -> int:
    """Return the smallest number of runs that can bound `risk`: 1/risk - 1, rounded up."""
    return math.ceil(1 / exact_risk(risk) - 1)


def conformal_bound(scores: Sequence[float], risk: float, others: int = 0) -> float | None:
    """Return the smallest of `scores` that the next run exceeds with a probability of at most `risk`. `others` is the
    number of runs that exceed no bound.

    Return None with fewer than `runs_needed(risk)` runs, infinity if the score in question is that of a run that ran
    out of memory, and minus infinity if there are so many `others` that any bound holds.
    """
    exceeding = math.floor(exact_risk(risk) * (len(scores) + others + 1)) - 1
    if exceeding < 0:
        return None
    return sorted(scores)[len(scores) - 1 - exceeding] if exceeding < len(scores) else -math.inf


def no_bound_sentence(risk: float, runs: int, died: int = 0, holder: str = "the store") -> str:
    """Return why comparable runs give no bound at `risk`: there are too few, or too many of them ran out of memory."""
    needed = runs_needed(risk)
    if runs < needed:
        return f"risk {risk:g} needs {needed} comparable runs, {holder} holds {runs}"
    return f"risk {risk:g} has no bound: {died} of the {runs} comparable runs in {holder} ran out of memory"


def exact_risk(risk: float) -> Fraction:
    """Return the risk exactly as written. In binary, 100 x (1 - 0.01) is not 99."""
    return Fraction(str(risk))


@dataclass(frozen=True)
class JobClass:
    """The properties by which jobs are compared. `backend` is a value of `frameworks.recorded.TABLES`. `narrow` means
    that linear layers multiply in 8 or 4 bits. `capability` is the compute capability of the card, or None if it is
    unknown.

    `whole_segments` means that torch's segments do not expand, although those of the measured runs did. The memory that
    this adds is missing from their shortfalls (`margins.FRAGMENTS`).
    """

    backend: str
    mixture: bool
    narrow: bool
    capability: str | None
    whole_segments: bool = False

    @property
    def generation(self) -> str | None:
        """The architecture of the card, which is its major capability. Ada's 8.9 is not Ampere's."""
        return None if self.capability is None or self.capability == ADA else self.capability.split(".")[0]

    @property
    def name(self) -> str:
        layers, bits = "mixture" if self.mixture else "dense", "below 16 bits" if self.narrow else "16 bits"
        return f"{self.backend}, {layers}, {bits}"

    def pools(self) -> tuple[tuple[str, tuple[object, ...]], ...]:
        """Return the classes in which runs are pooled, narrowest first: the name and the key of each. The errors of the
        formulas depend on the backend, so the backend is the last property to be dropped."""
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
    """Return the class of measured runs with which the recipe's jobs are compared."""
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
    """One configuration that ran, with the highest peak of its ranks and repeats. `shortfall_bytes` is what the run
    needed beyond `predicted_bytes`, its predicted device peak; it is negative if the run needed less. For a run that
    ran out of memory it is the least that the run can have needed (its card less the prediction), and for a run that
    fitted the most."""

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
    """Return the unit, in bytes, in which shortfalls of predictions of this size are compared."""
    return GIB + UNIT_SHARE * predicted_bytes


@dataclass(frozen=True)
class EvidencePool:
    """The measured runs on which a margin is based: their number, how many `died` of memory, and the number of
    `sources`. `name` describes them, and `widened` means that the job's own class had too few. `shortfalls` are those
    of all runs but the ones known only to have fitted, ascending, in units of `unit_bytes`."""

    name: str
    runs: int
    died: int
    sources: int
    widened: bool
    shortfalls: tuple[float, ...]

    def units_at(self, risk: float) -> float:
        """Return the fewest units that must stay free for a risk of at most `risk`, never below 0. The number is just
        above the first shortfall that must be covered, because a run also runs out of memory if it fills its card
        exactly."""
        bound = conformal_bound(self.shortfalls, risk, self.runs - len(self.shortfalls))
        return math.inf if bound is None else max(math.nextafter(bound, math.inf), 0.0)

    def risk_of(self, units: float) -> float:
        """Return the risk of a run that has `units` free beyond its prediction."""
        beyond = len(self.shortfalls) - bisect.bisect_left(self.shortfalls, units)
        return min((beyond + 1) / (self.runs + 1), 1.0)

    @property
    def sentence(self) -> str:
        """The number and kind of these runs, without a full stop."""
        dead = f", {self.died} of which died" if self.died else ""
        wider = " (its own class has too few)" if self.widened else ""
        return f"{self.runs} measured {self.name}{dead}{wider}"


def evidence_pool(
    job: JobClass, risk: float, without_source: str | None = None, own_runs: Sequence[EvidenceRun] = ()
) -> EvidencePool | None:
    """Return the narrowest pool of runs that bounds `risk` for jobs of a class, from `own_runs` and all shipped runs
    except those of `without_source`. Return None if no run was measured on a card of the job's generation, or if too
    few runs bound the risk."""
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
    """Return the measured runs that are shipped with llmlaunch."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(
        EvidenceRun(name, source, JobClass(backend, mixture, narrow, capability), outcome, predicted, shortfall)
        for name, source, backend, mixture, narrow, capability, outcome, predicted, shortfall in content["runs"]
    )
