"""The docs show the rules the planner applies, word for word."""

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

DOCS = Path(__file__).resolve().parents[3] / "docs"


MEGATRON: list[tuple[Rule | Requirement, ...]] = [
    (*megatron_rules.MIXTURE_REQUIREMENTS, *megatron_rules.RULES),
    (*model_rules.MODEL_REQUIREMENTS, *model_rules.MODEL_RULES),
    (*number_rules.NUMBER_REQUIREMENTS, *number_rules.NUMBER_RULES),
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
TABLES = [
    *(("megatron*.md", rules_table(rules, layer_of)) for rules in MEGATRON),
    *(("deepspeed*.md", rules_table(rules)) for rules in DEEPSPEED),
    ("megatron-rules.md", disagreements_table()),
    ("deepspeed-memory.md", engines_table()),
    ("backends.md", techniques_table()),
    ("backends.md", rules_table(checkpoint_rules.CHECKPOINT_REQUIREMENTS, layer_of)),
]


@pytest.mark.parametrize(("pages", "table"), TABLES)
def test_the_docs_have_the_table_of_the_code(pages: str, table: str) -> None:
    texts = [page.read_text("utf-8") for page in sorted(DOCS.glob(pages))]
    assert any(table in text for text in texts), f"docs/{pages} is out of date; put this table there:\n{table}"
