"""DeepSpeed as the rooms above see it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmlaunch.frameworks.framework import TRACE_VARIABLE, Framework

if TYPE_CHECKING:
    from llmlaunch.command_lines.training_log import TrainingLog
    from llmlaunch.findings import Finding
    from llmlaunch.frameworks.base import Backend, RankAlone, Rendered
    from llmlaunch.layout import Layout
    from llmlaunch.memory.estimator import RankEstimate
    from llmlaunch.recipe.types import Recipe


class DeepSpeedFramework(Framework):
    """DeepSpeed: the shipped trainer of Hugging Face models, or a person's own script."""

    name: ClassVar = "deepspeed"
    requirement: ClassVar = "DeepSpeed"
    packages: ClassVar = ("deepspeed", "transformers")
    required_packages: ClassVar = ("deepspeed",)
    trains_on_cpus: ClassVar = True
    tracer: ClassVar = "deepspeed"
    traced_title: ClassVar = "DeepSpeed"
    traced_packages: ClassVar = ("deepspeed", "torch", "transformers", "peft")
    traced_apart: ClassVar = False
    how_to_trace: ClassVar = (
        "pip install --index-url https://download.pytorch.org/whl/cpu torch, then pip install 'llmlaunch[local]', "
        f"beside llmlaunch or in a folder that {TRACE_VARIABLE} names"
    )

    saves_at_the_end: ClassVar = ("--enable_jit_checkpoint",)

    def spellings(self) -> Mapping[str, tuple[str, ...]]:
        from llmlaunch.frameworks.deepspeed.settings import SETTINGS
        from llmlaunch.frameworks.deepspeed.trainer_table import ARGUMENTS

        rows = [(f"--{row.key}", (row.reads, *row.keys)) for row in ARGUMENTS]
        rows += [(row.key, (row.reads, *row.keys)) for row in SETTINGS]
        names: dict[str, tuple[str, ...]] = {}
        for name, keys in rows:
            for key in dict.fromkeys(keys):
                names[key] = (*names.get(key, ()), name)
        return names

    def backend(self) -> Backend:
        from llmlaunch.frameworks.deepspeed.backend import DeepSpeed

        return DeepSpeed()

    def timed_name(self, recipe: Recipe) -> str:
        """Return the kind of script where it does not train a Hugging Face model."""
        from llmlaunch.frameworks.deepspeed.facts import HUGGING_FACE_KINDS

        kind = recipe.backend.script_kind
        return self.name if kind in HUGGING_FACE_KINDS else kind

    def checkpoint_findings(
        self, recipe: Recipe, layout: Layout, folder: Path, names: Collection[str]
    ) -> Iterator[Finding]:
        from llmlaunch.frameworks.deepspeed.checkpoint_match import deepspeed_findings

        return deepspeed_findings(recipe, layout, folder, names)

    def rank_alone(
        self, recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int
    ) -> RankAlone:
        from llmlaunch.frameworks.deepspeed.trace import rank_alone

        return rank_alone(recipe, layout, rendered, pipeline_rank, steps)

    def traced_job(self, recipe: Recipe, rendered: Rendered, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
        from llmlaunch.frameworks.deepspeed.trace import deepspeed_job

        return deepspeed_job(recipe, rendered, layout, pipeline_rank)

    def traced_terms(self, trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
        from llmlaunch.frameworks.deepspeed.trace import deepspeed_terms

        return deepspeed_terms(trace, predicted)

    def compared_version(self, versions: Mapping[str, str]) -> str | None:
        return versions[self.name]

    def overrides_for_log(self, recipe: Recipe, log: TrainingLog) -> tuple[str, ...]:
        from llmlaunch.frameworks.deepspeed.training_log import trainer_overrides

        return trainer_overrides(recipe, log)


FRAMEWORK = DeepSpeedFramework()
