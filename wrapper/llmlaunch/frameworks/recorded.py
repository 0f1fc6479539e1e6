"""The trainers that a recipe can choose, under the names that measurement records give them.

What is known of a framework otherwise is in its folder. This module is imported by all that reads or prices records, so
it imports no folder.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmlaunch.frozen import frozen
from llmlaunch.recipe.frameworks import FRAMEWORKS, FrameworkName, FrameworkTraits

MEGATRON_FSDP = "megatron-fsdp"


@frozen
class RecordedTrainer:
    """What a record's backend says of its run.

    `name` is the record's `backend`, and `framework` the one that ran. `table` names the facts that price it: runs of
    trainers that share a table say something of one another. `title` is what the runs of a table are called in a
    sentence. `brings_recipes`: the framework comes with providers of models and with performance recipes, whose
    settings apply where a record names none.
    """

    name: str
    framework: FrameworkTraits
    table: str
    title: str
    brings_recipes: bool = False


def _trainer(framework: FrameworkName, table: str, title: str, brings_recipes: bool = False) -> RecordedTrainer:
    """Return the trainer that records name as recipes do."""
    return RecordedTrainer(framework, FRAMEWORKS[framework], table, title, brings_recipes)


RECORDED_TRAINERS: Mapping[str, RecordedTrainer] = {
    trainer.name: trainer
    for trainer in (
        _trainer("megatron-lm", "megatron", "Megatron"),
        _trainer("megatron-bridge", "megatron", "Megatron", brings_recipes=True),
        RecordedTrainer(MEGATRON_FSDP, FRAMEWORKS["megatron-lm"], MEGATRON_FSDP, "Megatron-FSDP"),
        _trainer("deepspeed", "deepspeed", "Hugging Face"),
    )
}
"""The trainers whose records llmlaunch prices, by the backend of their records."""

TABLES: Mapping[str, str] = {name: trainer.table for name, trainer in RECORDED_TRAINERS.items()}
"""The fact table of each backend that is priced. Runs of backends that share a table say something of one another."""
