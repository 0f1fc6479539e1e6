"""What was learned from the measured runs of one backend on one accelerator: the correction, the runs it comes from,
how well it predicted runs it had not seen, and their scores, on which a margin rests (docs/calibration.md)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmlaunch.calibration.margins import DIED
from llmlaunch.memory.correction import Correction

__all__ = ["SCHEMA", "Bound", "Calibration", "Errors", "Learned", "Score", "calibration_id", "calibration_of_json"]

SCHEMA = 1


@dataclass(frozen=True)
class Learned:
    """What a calibration was learned from. `runs` are configurations that ran, each counted once; `digest` is over all
    of them, so that equal digests are equal data."""

    runs: int
    records: int
    died: int
    digest: str
    families: Mapping[str, int]  # runs by family of models
    versions: Mapping[str, int]  # runs by version of the framework, "unknown" where no record says


@dataclass(frozen=True)
class Bound:
    """How far above its prediction a run peaks at most at `risk`: over all runs, and over those predicted near the
    limit, where a planner chooses. Null where there are fewer than `needed` of them, or too many died."""

    risk: float
    needed: int
    runs: int
    ratio: float | None
    near_limit_runs: int
    near_limit_ratio: float | None
    room: float | None = None  # mean of predicted x max(worse, 1) / measured: what a plan sets aside for what it uses

    @property
    def worse(self) -> float | None:
        """What a margin may rest on: the larger one, and that of all runs where too few were near the limit. None also
        where enough were near the limit and too many of them died."""
        if self.near_limit_runs < self.needed or self.ratio is None:
            return self.ratio
        return None if self.near_limit_ratio is None else max(self.ratio, self.near_limit_ratio)


@dataclass(frozen=True)
class Errors:
    """How far predictions of runs were off, by runs that lived. `worst_under` is measured / predicted - 1 of the run
    most under-predicted, 0 where none was."""

    mape: float
    bias: float  # mean of predicted / measured - 1
    worst_under: float
    under_share: float  # of the runs, those that were predicted too low
    bounds: tuple[Bound, ...]


@dataclass(frozen=True)
class Score:
    """One run: measured / predicted by a correction that was learned without its model and without its configuration;
    `DIED` where it ran out of memory, null in JSON. `family` is that of its model, `share` what the same
    correction predicts of the rule's limit."""

    score: float
    kind: str
    family: str
    version: str | None
    share: float | None


@dataclass(frozen=True)
class Calibration:
    """`estimator` is a digest of what prices (`calibration.digest`): scores hold for that alone. `made_at` is in unix
    seconds. `before` are the errors of what was in use when it was made, on the same runs."""

    id: str
    backend: str  # a value of calibration.records.TABLES
    accelerator: str
    made_at: float
    llmlaunch: str
    estimator: str
    data: Learned
    correction: Correction
    before: Errors
    after: Errors
    scores: tuple[Score, ...]

    def as_json(self) -> dict[str, Any]:
        """The shape of docs/schemas/calibration.schema.json."""
        correction = self.correction
        return {
            "schema": SCHEMA,
            "id": self.id,
            "backend": self.backend,
            "accelerator": self.accelerator,
            "made_at": self.made_at,
            "llmlaunch": self.llmlaunch,
            "estimator": self.estimator,
            "data": asdict(self.data),
            "correction": {"torch_share": correction.torch_share, "outside_bytes": correction.outside_bytes},
            "errors": {"before": asdict(self.before), "after": asdict(self.after)},
            "scores": [asdict(s) | {"score": None if s.score == DIED else s.score} for s in self.scores],
        }


def calibration_id(backend: str, accelerator: str, made_at: float) -> str:
    """One word of a shell, whatever the driver calls the accelerator."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{backend}-{accelerator}")
    return f"{plain}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(made_at))}"


def calibration_of_json(content: Mapping[str, Any]) -> Calibration:
    """Raises KeyError, TypeError or ValueError: not a calibration of this schema."""
    if content["schema"] != SCHEMA:
        raise ValueError(f"calibration {content['id']} has schema {content['schema']}, this version knows {SCHEMA}")
    plain = ("id", "backend", "accelerator", "made_at", "llmlaunch", "estimator")
    return Calibration(
        **{name: content[name] for name in plain},
        data=Learned(**content["data"]),
        correction=Correction(**content["correction"], calibration_id=content["id"]),
        before=_errors(content["errors"]["before"]),
        after=_errors(content["errors"]["after"]),
        scores=tuple(Score(**(s | {"score": DIED if s["score"] is None else s["score"]})) for s in content["scores"]),
    )


def _errors(content: Mapping[str, Any]) -> Errors:
    return Errors(**{**content, "bounds": tuple(Bound(**bound) for bound in content["bounds"])})
