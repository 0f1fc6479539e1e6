"""Whatever llmlaunch renders for Megatron-LM is read back as the same recipe."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.frameworks.argument import command_words, flag_groups
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.command_line import read_megatron
from llmlaunch.frameworks.megatron.differences import pinned_layout
from llmlaunch.frameworks.megatron.versions import rendered_arguments
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.types import Recipe
from support.megatron_cases import Case, cases, refusals


def words_of(recipe: Recipe, layout: Layout) -> tuple[str, ...]:
    arguments, _ = rendered_arguments(recipe, planned_arguments(recipe, layout))
    return tuple(str(word) for word in command_words(arguments))


def by_flag(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Values by flag; those of a set of modules in one order."""
    return {str(flag): sorted(map(str, values)) for flag, *values in flag_groups(words)}


@settings(max_examples=25)
@given(cases())
def test_what_is_rendered_is_read_back(case: Case) -> None:
    model, moe = case.recipe.model, case.recipe.model.moe
    assume(case.layout.recompute_layers <= model.num_layers)
    assume(not refusals(case) and (moe is None or moe.grouped_gemm is not False))  # which no key of a recipe says
    devices = case.recipe.cluster.devices_per_node
    reading = read_megatron(TrainerCommand("pretrain_gpt.py", case.words, nodes=1, devices_per_node=devices))
    blackwell = float(case.recipe.cluster.accelerator.compute_capability or 0.0) >= 10.0  # which 4 bits need
    cluster = {"base": "b200-x8" if blackwell else "h100-80gb-x8", "devices_per_node": devices}
    document: dict[str, Any] = {**reading.document, "cluster": cluster}
    recipe = recipe_from(Document("read back", "", document, {}, {}))
    assert by_flag(words_of(recipe, pinned_layout(recipe))) == by_flag(case.words), case
    assert (recipe.backend.extra_args, reading.unread, reading.missing, reading.not_rendered) == ((), (), (), None)
