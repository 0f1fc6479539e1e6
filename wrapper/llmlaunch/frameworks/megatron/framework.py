"""Megatron-LM as the rooms above see it, and what it has in common with others in which Megatron core trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import TRACE_VARIABLE, Framework

if TYPE_CHECKING:
    from llmlaunch.findings import Finding
    from llmlaunch.frameworks.base import Backend, OmittedTechnique, RankAlone, Rendered
    from llmlaunch.layout import Layout
    from llmlaunch.memory.estimator import RankEstimate
    from llmlaunch.recipe.types import Recipe


CORE = "megatron-core"


class OnMegatronCore(Framework):
    """What holds wherever Megatron core trains."""

    packages: ClassVar = (CORE, "transformer-engine")
    saves_at_the_end: ClassVar = ("--exit-signal-handler", "--exit-duration-in-mins")
    tracer: ClassVar = "megatron"
    traced_packages: ClassVar = (CORE,)

    def spellings(self) -> Mapping[str, tuple[str, ...]]:
        from llmlaunch.frameworks.megatron.flags.table import flags

        spelled: dict[str, tuple[str, ...]] = {}
        for row in flags():
            for key in dict.fromkeys((*row.reads, *row.keys)):
                spelled[key] = (*spelled.get(key, ()), row.name)
        return spelled

    def flags_for_speed(self) -> frozenset[str]:
        from llmlaunch.frameworks.megatron.flags.table import flags

        return frozenset(row.name for row in flags() if row.only_helps)

    def checkpoint_findings(
        self, recipe: Recipe, layout: Layout, folder: Path, names: Collection[str]
    ) -> Iterator[Finding]:
        from llmlaunch.frameworks.megatron.checkpoint_match import megatron_findings

        return megatron_findings(recipe, layout, folder, names)

    def has_own_weights(self, folder: Path) -> bool:
        return True

    def own_weights_problem(self, folder: Path) -> str | None:
        from llmlaunch.frameworks.megatron.starting_weights import weights_problem

        return weights_problem(folder)

    def own_weights_findings(self, recipe: Recipe, layout: Layout, folder: Path) -> Iterator[Finding]:
        from llmlaunch.frameworks.megatron.starting_weights import other_model

        return other_model(recipe, layout, folder)

    def rank_alone(
        self, recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int
    ) -> RankAlone:
        from llmlaunch.frameworks.megatron.trace import rank_alone

        return rank_alone(recipe, layout, rendered, pipeline_rank, steps)

    def omitted_alone(self, recipe: Recipe, traced: bool) -> tuple[OmittedTechnique, ...]:
        from llmlaunch.frameworks.megatron.trace import omitted_techniques

        return omitted_techniques(recipe, traced)

    def traced_job(self, recipe: Recipe, rendered: Rendered, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
        from llmlaunch.frameworks.megatron.trace import megatron_job

        return megatron_job(recipe, rendered, layout, pipeline_rank)

    def traced_terms(self, trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
        from llmlaunch.frameworks.megatron.trace import megatron_terms

        return megatron_terms(trace, predicted)


class MegatronLMFramework(OnMegatronCore):
    """Megatron-LM: `pretrain_gpt.py` of a checkout, or a person's own script of its kind."""

    name: ClassVar = "megatron-lm"
    requirement: ClassVar = "Megatron"
    traced_title: ClassVar = "Megatron-LM"
    starter_lines: ClassVar = (
        "backend:",
        "  name: megatron-lm",
        f"  {'# path: /opt/Megatron-LM':<29}  # your checkout on the nodes; absent = their MEGATRON_LM_PATH",
    )

    def backend(self) -> Backend:
        from llmlaunch.frameworks.megatron.backend import MegatronLM

        return MegatronLM()

    def recorded_name(self, recipe: Recipe) -> str:
        """Return "megatron-fsdp" where Megatron-FSDP shards the model: it keeps other things in memory."""
        from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
        from llmlaunch.frameworks.recorded import MEGATRON_FSDP

        return MEGATRON_FSDP if asks_for_sharding(recipe) else self.name

    def default_version(self) -> str | None:
        from llmlaunch.frameworks.megatron.parser import NEWEST

        return NEWEST

    def trainer_findings(self, recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
        from llmlaunch.frameworks.megatron.checkout import checkout_findings

        return checkout_findings(recipe, environment)

    def trace_notes(
        self, recipe: Recipe, folder: Path, versions: Mapping[str, str], how_to_get_one: str
    ) -> tuple[str, ...]:
        """Say where the arguments were rendered for another version. Raises UserError where the environment's version
        takes other arguments than the job's."""
        from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, known_version, rendered_version

        job_version, here = recipe.backend.runs_version, versions.get(CORE, "unknown")
        rendered_as = rendered_version(recipe)
        if known_version(here) is None:
            raise UserError(
                f"{folder}: holds Megatron core {here}, and a trace knows {', '.join(KNOWN_VERSIONS)} alone; "
                f"{how_to_get_one}"
            )
        if known_version(here) != rendered_as:
            raise UserError(
                f"{recipe.path}: backend.version: the job runs Megatron core {job_version or rendered_as}, and "
                f"{folder} holds {here}: what that keeps in memory is another job's. "
                f"backend.version={known_version(here)} rehearses the job as of that version; "
                f"{TRACE_VARIABLE}=FOLDER names an environment with core {rendered_as}"
            )
        if job_version is not None and known_version(job_version) is None:
            return (f"the job runs Megatron core {job_version}; this is {here}, whose arguments were rendered for it",)
        return ()


FRAMEWORK = MegatronLMFramework()
