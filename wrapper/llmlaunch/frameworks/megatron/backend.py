"""Megatron-LM as a backend: the facts about its memory, the techniques that a search tries, and the legal layouts."""

from __future__ import annotations

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.argument import expands_segments
from llmlaunch.frameworks.base import Rendered, Space, refuse_unmet, unrendered
from llmlaunch.frameworks.classed_arguments import NO_ARGUMENTS, ClassedArguments
from llmlaunch.frameworks.megatron.facts import FUSED_LOSSES, MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.offered_techniques import state_techniques, step_techniques, usable_libraries
from llmlaunch.frameworks.megatron.parser import NEWEST, rendered_version
from llmlaunch.frameworks.megatron.rules import requirements_for, rules_for
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
from llmlaunch.layout import Layout, Rule
from llmlaunch.recipe.types import Recipe

MOST_TENSOR = 64


class MegatronLM:
    """`pretrain_gpt.py` of a Megatron-LM checkout, or a script of the user's own that takes the same arguments, in the
    recipe's version of core."""

    name = "megatron-lm"

    def rules(self, recipe: Recipe) -> tuple[Rule, ...]:
        """Return the rules for the recipe's layouts. Raises UserError if Megatron-LM has no flag for the model or a
        technique, or if the device lacks a number format."""
        refuse_unmet(recipe, requirements_for(recipe), to_render=False)
        return rules_for(recipe)

    def unrendered(self, recipe: Recipe) -> tuple[str, ...]:
        return unrendered(recipe, requirements_for(recipe))

    def space(self, recipe: Recipe) -> Space:
        """Return the search space. Tensor parallelism stays within the NVLink domain: beyond it, every layer would wait
        for the fabric."""
        widest = min(recipe.cluster.nvlink_domain_devices, MOST_TENSOR)
        tensor = tuple(size for size in range(1, widest + 1) if recipe.world_size % size == 0)
        sharded = asks_for_sharding(recipe)
        return Space(
            tensor=tensor,
            pipeline=(1,) if sharded else (),
            virtual_pipeline=(1,) if sharded else (),
            expert_tensor=tensor if recipe.model.moe else (1,),
            sequence_parallel=(0, 1),
            step_techniques=step_techniques(recipe),
            state_techniques=state_techniques(recipe),
            uneven=not sharded,
            libraries=tuple(usable_libraries(recipe)),
        )

    def facts(self, recipe: Recipe) -> MemoryFacts:
        options = _options(recipe)
        if not asks_for_sharding(recipe):
            return megatron_facts(options)
        from llmlaunch.frameworks.megatron.sharding_rules import sharding_facts

        return sharding_facts(recipe, options)

    def classed_arguments(self, recipe: Recipe, layout: Layout) -> ClassedArguments:
        """Return the user's own arguments with their classes. Raises UserError if one contradicts the plan."""
        if not recipe.backend.has_own_arguments:
            return NO_ARGUMENTS
        from llmlaunch.frameworks.megatron.extra_arguments import classed_arguments

        return classed_arguments(recipe, layout)

    def notes(self, recipe: Recipe, layout: Layout) -> tuple[str, ...]:
        return ()

    def always_renders(self, recipe: Recipe) -> bool:
        """Whether `render` cannot refuse the recipe. It may refuse arguments and variables that the user adds, a data
        source of another trainer, and features that another version of core lacks."""
        added = recipe.backend.has_own_arguments or recipe.environment or recipe.data.python_source
        return not added and rendered_version(recipe) == NEWEST

    def render(self, recipe: Recipe, layout: Layout) -> Rendered:
        from llmlaunch.frameworks.megatron.program import rendered_program

        return rendered_program(recipe, layout)


def _options(recipe: Recipe) -> MegatronOptions:
    capability, numbers = recipe.cluster.accelerator.compute_capability, recipe.training.numbers
    options = MegatronOptions(
        recipe.workload.precision,
        version=rendered_version(recipe),
        gradient_dtype=recipe.training.gradient_dtype,
        optimizer=numbers.optimizer,
        muon=recipe.training.muon,
        matrices_whole=True,
        context_all_to_all=recipe.techniques.context_comm == "a2a",
        tp_comm_overlap=recipe.techniques.tp_comm_overlap,
        experts_fused=recipe.techniques.expert_rank_capacity_factor is not None,
        loss=recipe.techniques.loss if recipe.techniques.loss in FUSED_LOSSES else "none",  # others are refused
        te_loss_keeps_logits=True,
        fp8_recipe=numbers.narrow,
        fp8_parameters=numbers.narrow_parameters,
        compute_capability=float(capability) if capability else None,
        expandable_segments=expands_segments(recipe),
        async_save=recipe.training.async_save,
        attention_masks=recipe.data.attention_masks,
        optimizer_instances=recipe.techniques.optimizer_instances,
        nvlink_domain_devices=max(recipe.cluster.nvlink_domain_devices, recipe.cluster.devices_per_node),
    )
    if not recipe.backend.has_own_arguments:
        return options
    from llmlaunch.frameworks.megatron.extra_arguments import with_extra_arguments

    return with_extra_arguments(recipe, options)
