"""What was learned from the measured runs of one backend on one accelerator: the correction, the runs it comes from,
its errors on runs it had not seen, and their scores, on which a margin rests (docs/calibration.md)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import llmlaunch
from llmlaunch.calibration.margins import DIED, Bound, Score
from llmlaunch.memory.job import Correction

__all__ = [
    "MODULES",
    "ROOMS",
    "Calibration",
    "Errors",
    "TrainingData",
    "calibration_id",
    "calibration_of_json",
    "digest_of",
    "estimator_digest",
]

SCHEMA = 1
IDENTITY = ("id", "backend", "accelerator", "made_at", "llmlaunch", "estimator")
# What prices a record: the formula, its constants, the facts of the backends, how records are read and cards named.
ROOMS = ("effects", "families", "layers", "memory", "models", "techniques")
MODULES = (
    *("facts.py", "layout.py", "workload.py"),
    *("recipe/frameworks.py", "frameworks/recorded.py"),
    *(f"frameworks/deepspeed/{name}.py" for name in ("facts", "family_facts", "zero_settings")),
    "frameworks/megatron/facts.py",
    *(f"calibration/{name}.py" for name in ("cases", "completion", "trainers")),
    *("calibration/deepspeed_records.py", "calibration/megatron_records.py"),
    *("cluster/accelerators.json", "cluster/cards.py"),
)


@dataclass(frozen=True)
class TrainingData:
    """What a calibration was learned from. `runs` are configurations that ran, each counted once; `digest` is over all
    of them, so that equal digests are equal data."""

    runs: int
    records: int
    died: int
    digest: str
    families: Mapping[str, int]  # runs by family of models
    versions: Mapping[str, int]  # runs by version of the framework, "unknown" if no record tells


@dataclass(frozen=True)
class Errors:
    """Errors of predictions on runs that lived. `worst_under` is measured / predicted - 1 of the run most
    under-predicted, 0 if there is none."""

    mape: float
    bias: float  # mean of predicted / measured - 1
    worst_under: float
    under_share: float  # of the runs, those that were predicted too low
    bounds: tuple[Bound, ...]


@dataclass(frozen=True)
class Calibration:
    """A correction with its evidence. Each score is of a run whose model and configuration the correction behind it
    had not seen. `before` are the errors, on the same runs, of what was in use when this was made."""

    id: str
    backend: str  # a value of calibration.records.TABLES
    accelerator: str
    made_at: float  # unix seconds
    llmlaunch: str  # version
    estimator: str  # `estimator_digest` at the time: the scores hold for predictions of that digest only
    data: TrainingData
    correction: Correction
    before: Errors
    after: Errors
    scores: tuple[Score, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the shape of docs/schemas/calibration.schema.json."""
        correction = self.correction
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in IDENTITY},
            "data": asdict(self.data),
            "correction": {"torch_share": correction.torch_share, "outside_bytes": correction.outside_bytes},
            "errors": {"before": asdict(self.before), "after": asdict(self.after)},
            "scores": [asdict(s) | {"score": None if s.score == DIED else s.score} for s in self.scores],
        }


def calibration_id(backend: str, accelerator: str, made_at: float) -> str:
    """Return an id that is one word of a shell, whatever characters the accelerator's name has."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{backend}-{accelerator}")
    return f"{plain}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(made_at))}"


def calibration_of_json(content: Mapping[str, Any]) -> Calibration:
    """Return the calibration that `as_json` wrote. Raises KeyError, TypeError or ValueError for another schema."""
    if content["schema"] != SCHEMA:
        raise ValueError(f"calibration {content['id']} has schema {content['schema']}, this version knows {SCHEMA}")
    return Calibration(
        **{name: content[name] for name in IDENTITY},
        data=TrainingData(**content["data"]),
        correction=Correction(**content["correction"], calibration_id=content["id"]),
        before=_errors(content["errors"]["before"]),
        after=_errors(content["errors"]["after"]),
        scores=tuple(Score(**(s | {"score": DIED if s["score"] is None else s["score"]})) for s in content["scores"]),
    )


def _errors(content: Mapping[str, Any]) -> Errors:
    return Errors(**{**content, "bounds": tuple(Bound(**bound) for bound in content["bounds"])})


@cache
def estimator_digest() -> str:
    """Return the sha256 over names and contents of the sources that price."""
    return digest_of(Path(llmlaunch.__file__).parent)


def digest_of(root: Path, rooms: Sequence[str] = ROOMS, modules: Sequence[str] = MODULES) -> str:
    """Return the digest of the sources of `rooms` and `modules` below a folder."""
    sources = [path for room in rooms for path in (root / room).rglob("*") if path.suffix in (".py", ".json")]
    digest = sha256()
    for path in sorted([*sources, *(root / name for name in modules)]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
