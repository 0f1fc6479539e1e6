"""How far measured step times are from predicted ones, by the kind of job: the backend, what is trained, and the kind
of model. A kind that no run was measured of has no such figure, and nothing is said in its place.

The figures are made from the measured runs that come with the source (`make step-time-table`).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from llmlaunch.cluster.profile import Accelerator
from llmlaunch.frameworks.recorded import RECORDED_TRAINERS, TABLES
from llmlaunch.frozen import frozen
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques

TABLE = Path(__file__).with_name("step_time_errors.json")
ALL_PARAMETERS, ADAPTERS, LAST_LAYERS, CONVERSATIONS = "all parameters", "adapters", "last layers", "conversations"
DENSE, MIXTURE = "dense", "mixture"
WORDS = {
    **{trainer.table: trainer.title for trainer in RECORDED_TRAINERS.values()},
    DENSE: "dense models",
    MIXTURE: "mixtures",
    ALL_PARAMETERS: "",
    ADAPTERS: " with adapters",
    LAST_LAYERS: " whose last layers alone are trained",
    CONVERSATIONS: " that learn conversations",
}
# NVIDIA's performance recipes set moe_router_force_load_balancing (Megatron-Bridge, scripts/performance)
OF_EVEN_TOKENS = ", their tokens forced into equal shares for all experts"


@frozen
class JobKind:
    """The properties of a run by which measured step times apply to a job. `backend` is a value of
    `frameworks.recorded.TABLES` or the name of another trainer, `training` what is trained, and `model` the kind of
    model: DENSE or MIXTURE, after what its layers have besides full attention ("Mamba-2 mixture")."""

    backend: str
    training: str
    model: str

    @property
    def measured_words(self) -> str:
        """The runs of this kind that were measured, in the plural. Those of mixtures are benchmarks that give each
        expert as many tokens as any other, which a person's own data does not."""
        return f"{self.words}{OF_EVEN_TOKENS if self.model.endswith(MIXTURE) else ''}"

    @property
    def words(self) -> str:
        """The kind for a person, in the plural: `Hugging Face mixtures with adapters`."""
        mixer, _, kind = self.model.rpartition(" ")
        before = f"{mixer} " if mixer else ""
        return f"{WORDS.get(self.backend, self.backend)} {before}{WORDS[kind]}{WORDS[self.training]}"


@frozen
class StepTimeError:
    """The root mean square of the relative differences between measured and predicted step times of `runs`, a common
    bias included; None of too few."""

    spread: float | None
    runs: int


def job_kind(
    backend: str, shape: ModelShape, techniques: Techniques, accelerator: Accelerator, conversations: bool = False
) -> JobKind | None:
    """Return the kind of a job by its backend's name in records; None on a device of a make that no run was measured
    on, such as a processor."""
    if accelerator.compute_capability is None:
        return None
    training = ALL_PARAMETERS
    if conversations:
        training = CONVERSATIONS
    elif techniques.adapters is not None:
        training = ADAPTERS
    elif techniques.trained_layers is not None:
        training = LAST_LAYERS
    model = " ".join([*_beside_attention(shape), DENSE if shape.moe is None else MIXTURE])
    return JobKind(TABLES.get(backend, backend), training, model)


def _beside_attention(shape: ModelShape) -> list[str]:
    """Return what a model has that dense models and mixtures with full attention have not."""
    has = {
        "Mamba-2": shape.mamba is not None,
        "delta-net": shape.linear_attention is not None,
        "sparse-attention": shape.indexer is not None or shape.compressed_attention is not None,
        "vision": shape.vision is not None,
    }
    return [name for name, present in has.items() if present]


def step_time_error(kind: JobKind | None) -> StepTimeError | None:
    """Return how far measured step times of this kind are from predicted ones; None where none was measured."""
    return None if kind is None else _errors().get(kind)


@cache
def _errors() -> dict[JobKind, StepTimeError]:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["kinds"]
    return {
        JobKind(row["backend"], row["training"], row["model"]): StepTimeError(row["spread"], row["runs"])
        for row in rows
    }
