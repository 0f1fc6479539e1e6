"""What was learned from the measured runs of one class of jobs, of their peaks or of their step times: the correction,
the runs it comes from, its errors on runs it had not seen, and their scores, on which a margin rests
(docs/calibration.md)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import llmlaunch
from llmlaunch.calibration.ratios import DEATH, Bound, Score
from llmlaunch.memory.job import NO_CORRECTION, Correction
from llmlaunch.timing.correction import FACTORS, NO_TIME_CORRECTION, TimeCorrection

SCHEMA = 1
IDENTITY = ("id", "backend", "accelerator", "made_at", "llmlaunch", "estimator")
# What prices a record: the formula, its constants, what the frameworks say of a recipe, how records are read and cards
# named.
ROOMS = ("effects", "families", "frameworks", "layers", "memory", "models", "recipe", "techniques")
MODULES = (
    *("facts.py", "layout.py", "workload.py"),
    *("calibration/cases.py", "calibration/records.py"),
    *("cluster/accelerators.json", "cluster/cards.py"),
)


Learned = TypeVar("Learned", Correction, TimeCorrection)


@dataclass(frozen=True, eq=False)
class Quantity(Generic[Learned]):
    """What is measured and predicted. `prefix` begins the ids of its calibrations; `parts` are the numbers of a
    correction, which `correction` makes, and `none` is the one that changes nothing. `rooms` and `modules` are the
    sources that predict it. `outdated_counts`: a correction that was learned for other formulas still adds to
    predictions, because too much is safe."""

    name: str
    prefix: str
    parts: tuple[str, ...]
    correction: Callable[..., Learned]
    none: Learned
    rooms: tuple[str, ...]
    modules: tuple[str, ...]
    outdated_counts: bool


MEMORY = Quantity(
    name="peak bytes",
    prefix="",
    parts=("torch_share", "outside_bytes"),
    correction=Correction,
    none=NO_CORRECTION,
    rooms=ROOMS,
    modules=MODULES,
    outdated_counts=True,
)
# what prices memory is among it: what a device holds decides what it sends
TIME = Quantity(
    name="step seconds",
    prefix="time-",
    parts=FACTORS,
    correction=TimeCorrection,
    none=NO_TIME_CORRECTION,
    rooms=(*ROOMS, "timing"),
    modules=(*MODULES, "calibration/step_times.py"),
    outdated_counts=False,
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
class Calibration(Generic[Learned]):
    """A correction with its evidence. Each score is of a run whose model and configuration the correction behind it
    had not seen. `before` are the errors, on the same runs, of what was in use when this was made."""

    quantity: Quantity[Learned]
    id: str
    backend: str  # a value of frameworks.recorded.TABLES
    accelerator: str  # of step times: with the kind of models and the machine, in words (`TimeClass.key`)
    made_at: float  # unix seconds
    llmlaunch: str  # version
    estimator: str  # `estimator_digest` at the time: the scores hold for predictions of that digest only
    data: TrainingData
    correction: Learned
    before: Errors
    after: Errors
    scores: tuple[Score, ...]

    @property
    def outdated(self) -> bool:
        """Whether it was learned for another version of the formula."""
        return self.estimator != estimator_digest(self.quantity)

    def as_json(self) -> dict[str, Any]:
        """Return the shape of docs/schemas/calibration.schema.json."""
        return {
            "schema": SCHEMA,
            "quantity": self.quantity.name,
            **{name: getattr(self, name) for name in IDENTITY},
            "data": asdict(self.data),
            "correction": {name: getattr(self.correction, name) for name in self.quantity.parts},
            "errors": {"before": asdict(self.before), "after": asdict(self.after)},
            "scores": [asdict(s) | {"score": None if s.score == DEATH else s.score} for s in self.scores],
        }


def calibration_id(backend: str, accelerator: str, made_at: float) -> str:
    """Return an id that is one word of a shell, whatever characters the accelerator's name has."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{backend}-{accelerator}")
    return f"{plain}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(made_at))}"


def calibration_of_json(content: Mapping[str, Any]) -> Calibration[Any]:
    """Return the calibration that `as_json` wrote. Raises KeyError, TypeError or ValueError for another schema."""
    if content["schema"] != SCHEMA:
        raise ValueError(f"calibration {content['id']} has schema {content['schema']}, this version knows {SCHEMA}")
    quantity: Quantity[Any] = {kind.name: kind for kind in (MEMORY, TIME)}[content["quantity"]]
    data = TrainingData(**content["data"])
    counted = {"runs": data.runs} if quantity is TIME else {}
    return Calibration(
        quantity=quantity,
        **{name: content[name] for name in IDENTITY},
        data=data,
        correction=quantity.correction(**content["correction"], calibration_id=content["id"], **counted),
        before=_errors(content["errors"]["before"]),
        after=_errors(content["errors"]["after"]),
        scores=tuple(Score(**(s | {"score": DEATH if s["score"] is None else s["score"]})) for s in content["scores"]),
    )


def _errors(content: Mapping[str, Any]) -> Errors:
    return Errors(**{**content, "bounds": tuple(Bound(**bound) for bound in content["bounds"])})


@cache
def estimator_digest(quantity: Quantity[Any] = MEMORY) -> str:
    """Return the sha256 over names and contents of the sources that predict a quantity."""
    return digest_of(Path(llmlaunch.__file__).parent, quantity.rooms, quantity.modules)


def digest_of(root: Path, rooms: Sequence[str] = ROOMS, modules: Sequence[str] = MODULES) -> str:
    """Return the digest of the sources of `rooms` and `modules` below a folder."""
    sources = [path for room in rooms for path in (root / room).rglob("*") if path.suffix in (".py", ".json")]
    digest = sha256()
    for path in sorted([*sources, *(root / name for name in modules)]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
