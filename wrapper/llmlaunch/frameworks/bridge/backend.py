"""Megatron-Bridge as a backend: memory, time and rules of Megatron core, and the settings Bridge is started with."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.argument import RUN_DIR, NodeVariable
from llmlaunch.frameworks.base import Rendered, Space, refuse_unmet, refuse_what_ifs, unrendered
from llmlaunch.frameworks.bridge.overrides import classed_overrides
from llmlaunch.frameworks.bridge.rules import ALL_REQUIREMENTS, BRIDGE_RULES, PACKED_RULES
from llmlaunch.frameworks.bridge.settings import as_json, settings_of, task_of
from llmlaunch.frameworks.classed_arguments import ClassedArguments
from llmlaunch.frameworks.logs import megatron_lines
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.program import environment, kernel_notes, variable_reasons
from llmlaunch.frameworks.megatron.rules import rules_for
from llmlaunch.layout import OFFLOAD_LAYERS, Layout, Rule
from llmlaunch.recipe.types import Recipe
from llmlaunch.trainers import MEGATRON_BRIDGE

PACKED = (
    "data.packed: global_batch_size counts sequences of several rows each; memory is that of full sequences, and "
    "attention is timed as though each were one row, so that a step of short rows is faster"
)
ENTRY_FILE, SETTINGS_FILE = "trainer/megatron_bridge.py", "bridge.json"


class MegatronBridge:
    """Bridge's `pretrain` or `finetune` with a ConfigContainer of the recipe, around megatron-lm's Megatron core."""

    name = "megatron-bridge"

    def rules(self, recipe: Recipe) -> tuple[Rule, ...]:
        """Raises UserError for what Megatron core cannot do, or Bridge has no setting for."""
        refuse_unmet(recipe, ALL_REQUIREMENTS, to_render=False)
        packed = PACKED_RULES if recipe.data.packed else ()
        return (*rules_for(recipe), *BRIDGE_RULES, *packed)

    def unrendered(self, recipe: Recipe) -> tuple[str, ...]:
        return unrendered(recipe, ALL_REQUIREMENTS)

    def space(self, recipe: Recipe) -> Space:
        """Nobody has tried adapters beside layers that wait on the host, or mixtures computed again; and what rows
        that are packed exclude is not searched."""
        space = MegatronLM().space(recipe)
        if recipe.data.packed:
            apart = (
                step
                for step in space.step_techniques
                if not (step.overlap_expert_communication or step.delay_weight_gradients or step.cuda_graphs)
            )
            space = replace(space, step_techniques=tuple(apart))
        if recipe.techniques.adapters is None:
            return space
        steps = tuple(
            step
            for step in space.step_techniques
            if step.solved != OFFLOAD_LAYERS and "moe" not in step.recompute_modules and not step.overlap_shared_expert
        )
        states = tuple(state for state in space.state_techniques if not state.offload_optimizer)
        return replace(space, step_techniques=steps, state_techniques=states)

    def facts(self, recipe: Recipe) -> MemoryFacts:
        """Frozen linears keep no input of their own (transformer_engine/pytorch/module/linear.py, 2.20): the adapter
        beside one does, and multiplies in the compute format."""
        facts = MegatronLM().facts(recipe)
        layer, adapters = facts.layer, replace(facts.adapters, adapters_fused=True)
        if layer.quantized is not None and recipe.techniques.adapters is not None:
            layer = replace(layer, quantized=replace(layer.quantized, input_bytes=layer.activation_bytes))
        return replace(facts, layer=layer, adapters=adapters)

    def classed_arguments(self, recipe: Recipe, layout: Layout) -> ClassedArguments:
        """Raises UserError where one of the person's own settings contradicts the plan."""
        if recipe.backend.extra_args and not recipe.techniques.what_ifs:
            settings_of(recipe, layout)
        return classed_overrides(recipe)

    def notes(self, recipe: Recipe, layout: Layout) -> tuple[str, ...]:
        """Return how rows that are packed are priced."""
        return (PACKED,) if recipe.data.packed else ()

    def always_renders(self, recipe: Recipe) -> bool:
        return False

    def render(self, recipe: Recipe, layout: Layout) -> Rendered:
        """Raises UserError where the recipe's environment contradicts the plan, for what no backend runs, and for what
        Bridge has no setting for."""
        refuse_what_ifs(recipe)
        refuse_unmet(recipe, ALL_REQUIREMENTS)
        settings, notes = settings_of(recipe, layout), self.notes(recipe, layout)
        entry = NodeVariable(RUN_DIR, f"/{ENTRY_FILE}")
        program = (entry, NodeVariable(RUN_DIR, f"/{SETTINGS_FILE}"))
        capability = recipe.cluster.accelerator.compute_capability
        known = ("--compute-capability", capability) if capability else ()
        return Rendered(
            program=program,
            environment=environment(recipe, layout),
            variables=variable_reasons(recipe),
            files={ENTRY_FILE: MEGATRON_BRIDGE.read_bytes(), SETTINGS_FILE: as_json(settings, task_of(recipe))},
            settings={name: reason for name, (_, reason) in settings.items()},
            settings_file=SETTINGS_FILE,
            notes=(*notes, *kernel_notes(recipe)),
            check=(*program, "--check", str(recipe.world_size), *known),
            prepare=(*program, "--pack") if recipe.data.packed else (),
            progress=megatron_lines(),
        )
