"""A config.json whose keys have any form: it is read, or one message names the file; nothing else is raised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.families.registry import family_named, family_names
from llmlaunch.families.written import read_config
from support.soak import examples

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "data" / "configs").glob("*.json"))
EVERYWHERE = ("rope_scaling", "rope_parameters", "quantization_config", "layer_types", "text_config", "vision_config")
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 200),
    st.sampled_from([10**25, 2**63, 1e300, 0.5, -0.5, "auto", "²", "", "full_attention", "yarn", "silu", "9" * 400]),
)
NAMES = st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "quant_method", "x"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)


@examples(60, 2000)
@given(st.data())
def test_it_is_read_or_one_message_says_why_not(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    values: dict[str, Any] = json.loads(data.draw(st.sampled_from(CONFIGS)).read_text())
    family = values.get("model_type")
    defaults = family_named(family).defaults if family in family_names() else {}
    names = sorted({*values, *defaults, *EVERYWHERE})
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        values[name] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(values))
    message = str(path)
    try:
        read_config(path)
    except UserError as mistake:
        message = str(mistake)
    assert message.startswith(str(path))


@pytest.mark.parametrize("kinds", [1, True, 0.5, {"a": 1}, "sliding_attention"])
def test_layers_that_are_no_list_are_refused_by_name(tmp_path: Path, kinds: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen2", "layer_types": kinds}))
    with pytest.raises(UserError, match=r"layer_types: must be a list"):
        read_config(path)
