"""Every row of the table of config.json's keys: what is written is read again, another value too, and the installed
transformers' class of the family has the key."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.family import ConfigKey
from llmlaunch.families.hub_ids import load_preset, preset_names
from llmlaunch.families.registry import all_families, family_names
from llmlaunch.families.vision import ENCODER
from llmlaunch.families.written import config_of, shape_from_config
from llmlaunch.models.shape import ModelShape

EACH_FAMILY = pytest.mark.parametrize(
    ("family", "rows"), [pytest.param(family, about.keys, id=family) for family, about in all_families()]
)
# Keys of files that the class keeps inside `rope_parameters`, or takes by another name.
INSIDE = {"partial_rotary_factor": "rope_parameters", "compress_rope_theta": "compress_rates"}
# Written for the class or for other code, while the shape follows from other keys.
NOT_READ = {
    "output_router_logits": "makes the class add the loss whose weight is router_aux_loss_coef",
    "pad_token_id": "a token that not every vocabulary has",
    "rope_theta": "goes after that of rope_parameters",
    "n_group": "DeepSeek-V2 reads it with topk_method group_limited_greedy alone",
    "topk_group": "is read where experts are in groups",
    "seq_aux": "is read as true or false",
    "intermediate_size": "every layer is a mixture",
    "mlp_only_layers": "every layer is a mixture",
    "norm_topk_prob": "the class has one value alone",
    "mamba_norm_before_gate": "is refused as true where a mixer has a norm",
}
LENGTHS, LISTS = ("num_hidden_layers",), ("layer_types", "mlp_layer_types")  # what lists one value for each layer


@cache
def shapes(family: str) -> tuple[ModelShape, ...]:
    """The shipped models of a family, without a vision encoder."""
    presets = map(load_preset, preset_names())
    return tuple(shape for shape in presets if shape.family == family and shape.vision is None) or tuple(
        replace(shape, vision=None) for shape in map(load_preset, preset_names()) if shape.family == family
    )


def field_of(shape: ModelShape, path: str) -> Any:
    part: Any = shape
    for name in path.split("."):
        part = None if part is None else getattr(part, name)
    return part


def others(value: Any) -> tuple[Any, ...]:
    """Values that a field could have instead."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value * 2, max(value // 2, 1), value + 1)
    if isinstance(value, float):
        return (value * 0.5, value + 0.125)
    return (64, 0.5)  # of one that may be absent


def agreeing(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Keys that another value of `key` decides: heads of a mixer and their width are its columns."""
    other = {"mamba_n_heads": "mamba_d_head", "mamba_d_head": "mamba_n_heads"}.get(key)
    return {} if other is None or "mamba_d_ssm" not in config else {"mamba_d_ssm": value * config[other]}


def has_part(shape: ModelShape, row: ConfigKey) -> bool:
    part = row.field.rpartition(".")[0]
    return not part or field_of(shape, part) is not None


@EACH_FAMILY
def test_a_key_that_is_written_is_read_into_the_same_field(family: str, rows: Sequence[ConfigKey]) -> None:
    read = [(shape, shape_from_config(config_of(shape), shape.name)[0]) for shape in shapes(family)]
    for row in rows:
        written = [(shape, back) for shape, back in read if has_part(shape, row)]
        assert written, row.key
        for shape, back in written:
            assert field_of(back, row.field) == field_of(shape, row.field), row.key


@EACH_FAMILY
def test_another_value_in_a_file_is_read_and_written_again(family: str, rows: Sequence[ConfigKey]) -> None:
    taken = set()
    for shape in shapes(family):
        config = config_of(shape)
        for row, value in ((r, value) for r in rows if r.key in config for value in others(config[r.key])):
            changed = {key: each for key, each in config.items() if not (row.key in LENGTHS and key in LISTS)}
            try:
                back, _ = shape_from_config({**changed, row.key: value, **agreeing(config, row.key, value)}, shape.name)
            except BadKey:
                continue  # a value that no such model has; another one is taken
            assert field_of(back, row.field) == config_of(back)[row.key] == value
            taken.add(row.key)
    assert taken == {row.key for row in rows}


@pytest.mark.parametrize("family", family_names())
def test_every_key_that_is_written_is_read(family: str) -> None:
    """A value that no key has is refused by name, or it changes the shape."""
    unread = set()
    for shape in shapes(family):
        config = config_of(shape)
        for key in config.keys() - {"model_type"}:
            try:
                back, _ = shape_from_config({**config, key: ["odd"]}, shape.name)
            except BadKey:
                continue
            if back == shape_from_config(config, shape.name)[0]:
                unread.add(key)
    assert unread <= NOT_READ.keys()


def test_an_encoders_keys_are_written_and_read() -> None:
    with_encoder = [shape for shape in map(load_preset, preset_names()) if shape.vision is not None]
    assert with_encoder
    for shape in with_encoder:
        config = config_of(shape)
        back, _ = shape_from_config(config, shape.name)
        for row in ENCODER:
            assert config["vision_config"][row.key] == field_of(shape, row.field) == field_of(back, row.field)


@cache
def class_keys(family: str) -> frozenset[str]:
    """The fields and other names that the installed classes of a family take, and what its modules look for besides;
    read without importing transformers."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    root, module = Path(spec.origin).parent, family.removesuffix("_text")
    files = [root / "configuration_utils.py", root / "models" / module / f"configuration_{module}.py"]
    trees = [ast.parse(file.read_text("utf-8")) for file in files]
    classes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    names: set[str] = set()
    for node in (node for each in classes for node in each.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            names |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    modeling = (root / "models" / module / f"modeling_{module}.py").read_text("utf-8")
    return frozenset(names | set(re.findall(r'getattr\(\s*config, "(\w+)"', modeling)))


@EACH_FAMILY
def test_the_installed_class_has_the_keys(family: str, rows: Sequence[ConfigKey]) -> None:
    assert [row.key for row in rows if not class_keys(family) & {row.key, INSIDE.get(row.key)}] == []
