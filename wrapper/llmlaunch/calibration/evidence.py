"""The margin that the measured runs shipped with llmlaunch give (`evidence.json`), joined by those of the store.

A run's shortfall is what it needed beyond its prediction, in bytes. Part of what a prediction misses is as large on
every card (a context, a communicator, a library's workspace), part grows with the job (fragments, buffers nobody
modelled), so shortfalls are compared in units of `unit_bytes`: 1 GiB and a share of the predicted peak. A margin is a
number of such units, and thus has a part in GiB and a part in percent.

The number is found by conformal risk control (Angelopoulos, Bates, Fisch, Lei and Schuster 2024, "Conformal Risk
Control", theorem 1): with n runs of a class and a loss that never rises with the margin, the smallest margin whose
summed loss L satisfies (L + 1) / (n + 1) <= risk has an expected loss of at most `risk` on the next run exchangeable
with them, whatever the distribution. The loss of a run is 1 if the margin would have called it safe and it needed more
than its limit:
- a measured peak: its shortfall exceeds the margin, as if it had been planned right up to its limit;
- a run that died: the margin would have called its prediction safe on the very card it died on;
- a run known only to have fitted: 0. It counts where its prediction was above half of its card, because planners choose
  there; a small job on a large card would only dilute the rest.
Runs of which less than 8 GiB was measured are left out: they say little of the jobs that fill a card.

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

from llmlaunch.calibration.margins import DIED as INFINITE
from llmlaunch.calibration.margins import FUJII_SHARE, NEAR, Score, runs_needed
from llmlaunch.calibration.records import TABLES
from llmlaunch.frameworks.argument import expands_segments
from llmlaunch.frameworks.registry import recorded_name
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import GIB

DEFAULT_RISK = 0.07  # where the recipe names none: at less, more than 9 % of the runs that fitted would be refused
TABLE = Path(__file__).parent / "evidence.json"  # `make evidence-table` writes it
UNIT_SHARE = 0.005  # of the predicted peak, in a unit of shortfall
ENOUGH = 2  # times the runs that a bound needs at all, so that not the single worst one decides
FEWEST_SOURCES = 2  # one source says nothing of how far sources lie apart
# Formulas of the trainers that a recipe can choose are held to traces of the real framework; those of the other
# backends among the shipped runs are read from source alone.
TRACED = frozenset(TABLES.values())
ADA = "8.9"
# Reserved / allocated of a job whose segments do not expand was 1.12 at two peaks (MEMO, SIGMOD 2025: 65.7 to 68.2 GB
# allocated, 73.5 to 76.5 reserved, and a request of 4 GB failed on 80 GB), where the prediction has 1.02.
FRAGMENTS = 0.10
OWN = "this store"  # the source of its runs
LIVED, DIED, FITTED = "lived", "died", "fitted"


@dataclass(frozen=True)
class JobClass:
    """What jobs are compared by. `backend` is a value of `calibration.records.TABLES`; `narrow` says that linear layers
    multiply in 8 or 4 bits; `capability` is the compute capability of the card, None where it is not known.

    `whole_segments` says that torch's segments do not expand where those of the measured runs did. What that adds is
    known to be missing from their shortfalls: FRAGMENTS of a prediction."""

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
    name, training = recorded_name(recipe), recipe.training
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
class EvidenceMargin:
    """What must stay free of the `memory_bytes` of a card, less what is known to be missing, and the evidence for it.
    `units` are the margin in units of `unit_bytes`; `runs` are those behind it, `sources` theirs, `pool` names them.
    `widened` says that the job's own class had too few."""

    memory_bytes: int
    risk: float
    units: float
    pool: str
    runs: int
    died: int
    sources: int
    widened: bool
    shortfalls: tuple[float, ...]  # units, ascending, of all runs but those that fitted

    @property
    def limit_bytes(self) -> int:
        """The largest prediction that with its margin stays within the card."""
        free = self.memory_bytes - self.units * GIB
        return max(int(free / (1.0 + self.units * UNIT_SHARE)), 0)

    def risk_of(self, device_bytes: int) -> float:
        """Return the risk that these runs state of a prediction of `device_bytes`."""
        units = (self.memory_bytes - device_bytes) / unit_bytes(device_bytes)
        beyond = len(self.shortfalls) - bisect.bisect_left(self.shortfalls, units)
        return min((beyond + 1) / (self.runs + 1), 1.0)

    @property
    def sentence(self) -> str:
        """What stays free, and how many measured runs stand behind it, in one line, without a full stop."""
        percent = 100.0 * self.units * UNIT_SHARE
        dead = f", {self.died} of which died" if self.died else ""
        wider = " (its own class has too few)" if self.widened else ""
        return (
            f"{self.units:.1f} GiB and {percent:.1f} % stay free, which at most {self.risk:.0%} of such jobs exceed: "
            f"{self.runs} measured {self.pool}{dead}{wider}"
        )


def evidence_margin(
    job: JobClass,
    memory_bytes: int,
    risk: float = DEFAULT_RISK,
    without_source: str | None = None,
    own_runs: Sequence[EvidenceRun] = (),
) -> EvidenceMargin | None:
    """Return the margin of a card of `memory_bytes` at `risk`, by all shipped runs but those `without_source` and by
    `own_runs`; None where no run was measured on a card of its generation, or too few runs bound the risk."""
    runs = [run for run in (*shipped_runs(), *own_runs) if run.source != without_source]
    if job.generation is None or not any(run.job.generation == job.generation for run in runs):
        return None
    fits_bytes = int(memory_bytes / (1.0 + FRAGMENTS)) if job.whole_segments else memory_bytes
    for step, (pool, key) in enumerate(job.pools()):
        members = [run for run in runs if run.job.pools()[step][1] == key]
        sources = len({run.source for run in members})
        if len(members) < ENOUGH * runs_needed(risk) or sources < FEWEST_SOURCES:
            continue
        shortfalls = tuple(sorted(run.units for run in members if run.outcome != FITTED))
        died = sum(run.outcome == DIED for run in members)
        units = _units_at(risk, shortfalls, len(members))
        return EvidenceMargin(fits_bytes, risk, units, pool, len(members), died, sources, step > 0, shortfalls)
    return None


def _units_at(risk: float, shortfalls: Sequence[float], runs: int) -> float:
    """Return the smallest margin with (losses + 1) / (runs + 1) <= risk, never below 0. It lies just above the
    shortfall that is the first not to be lost: a death is lost also where its card is filled exactly."""
    losses = math.floor(Fraction(str(risk)) * (runs + 1)) - 1
    if losses >= len(shortfalls):
        return 0.0
    return max(math.nextafter(shortfalls[len(shortfalls) - 1 - losses], math.inf), 0.0)


def own_runs(scores: Sequence[Score], job: JobClass, memory_bytes: int) -> tuple[EvidenceRun, ...]:
    """Return a store's runs of the job's class, on cards of `memory_bytes`, in the form of the shipped ones."""
    runs = []
    for index, score in enumerate(scores):
        predicted = 0 if score.share is None else round(score.share * FUJII_SHARE * memory_bytes)
        if predicted < NEAR * memory_bytes * FUJII_SHARE:
            continue
        died = score.score == INFINITE
        needed = memory_bytes - predicted if died else round((score.score - 1.0) * predicted)
        runs.append(EvidenceRun(f"own-{index}", OWN, job, DIED if died else LIVED, predicted, needed))
    return tuple(runs)


@cache
def shipped_runs() -> tuple[EvidenceRun, ...]:
    """Return the measured runs that come with llmlaunch."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(
        EvidenceRun(name, source, JobClass(backend, mixture, narrow, capability), outcome, predicted, shortfall)
        for name, source, backend, mixture, narrow, capability, outcome, predicted, shortfall in content["runs"]
    )
