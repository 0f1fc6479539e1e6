"""docs/backends.md shows the rules the planner applies, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.backends.deepspeed import hugging_face as deepspeed_hugging_face
from llmlaunch.backends.deepspeed import megatron_deepspeed
from llmlaunch.backends.deepspeed import pipeline as deepspeed_pipeline
from llmlaunch.backends.deepspeed import rules as deepspeed_rules
from llmlaunch.backends.deepspeed import techniques as deepspeed_techniques
from llmlaunch.backends.engines_table import engines_table
from llmlaunch.backends.megatron import checkpoint_rules, model_rules, number_rules, overlap, sharding_rules, versions
from llmlaunch.backends.megatron import rules as megatron_rules
from llmlaunch.backends.megatron import techniques as megatron_techniques
from llmlaunch.backends.megatron.disagreements import disagreements_table
from llmlaunch.backends.megatron.layers import layer_of
from llmlaunch.backends.requirements import Requirement
from llmlaunch.backends.rules_table import rules_table
from llmlaunch.backends.techniques_table import techniques_table
from llmlaunch.layout import Rule

PAGE = Path(__file__).resolve().parents[3] / "docs" / "backends.md"


MEGATRON: list[tuple[Rule | Requirement, ...]] = [
    (*megatron_rules.MIXTURE_REQUIREMENTS, *megatron_rules.RULES),
    (*model_rules.MODEL_REQUIREMENTS, *model_rules.MODEL_RULES),
    (*number_rules.NUMBER_REQUIREMENTS, *number_rules.NUMBER_RULES),
    checkpoint_rules.CHECKPOINT_REQUIREMENTS,
    (*overlap.OVERLAP_REQUIREMENTS, *overlap.OVERLAP_RULES),
    (*sharding_rules.SHARDING_REQUIREMENTS, *sharding_rules.SHARDING_RULES),
    (*megatron_techniques.REQUIREMENTS, *megatron_techniques.TECHNIQUE_RULES),
    (*versions.VERSION_REQUIREMENTS, *versions.VERSION_RULES["0.16"]),
]
DEEPSPEED: list[tuple[Rule | Requirement, ...]] = [
    deepspeed_rules.RULES,
    deepspeed_pipeline.PIPELINE_RULES,
    deepspeed_hugging_face.HUGGING_FACE_RULES,
    megatron_deepspeed.MEGATRON_DEEPSPEED_RULES,
    (
        *deepspeed_techniques.REQUIREMENTS,
        *deepspeed_techniques.TECHNIQUE_RULES,
        *deepspeed_techniques.WIDE_GRADIENT_RULES,
    ),
]
TABLES = [*(rules_table(rules, layer_of) for rules in MEGATRON), *map(rules_table, DEEPSPEED), disagreements_table()]


@pytest.mark.parametrize("table", TABLES)
def test_the_page_holds_the_rules_of_the_code(table: str) -> None:
    assert table in PAGE.read_text("utf-8"), f"docs/backends.md is out of date; put this table there:\n{table}"


def test_the_page_holds_deepspeeds_bytes_per_parameter() -> None:
    table = engines_table()
    assert table in PAGE.read_text("utf-8"), f"docs/backends.md is out of date; put this table there:\n{table}"


def test_the_page_holds_every_technique() -> None:
    table = techniques_table()
    assert table in PAGE.read_text("utf-8"), f"docs/backends.md is out of date; put this table there:\n{table}"
