"""`llmlaunch schema`: the published JSON Schemas, printed or written for an editor."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from llmlaunch.assets import asset
from llmlaunch.recipe.key_reference import recipe_keys, schema_names
from support.command_line import CommandLine
from support.recipe_keys import cluster_schema


def test_the_schema_of_a_recipe_is_printed_unless_another_is_named(llmlaunch: CommandLine) -> None:
    assert json.loads(llmlaunch("schema").stdout)["title"] == "llmlaunch recipe"
    assert json.loads(llmlaunch("schema", "plan").stdout)["title"].startswith("llmlaunch check --json")
    refused = llmlaunch("schema", "nonsense", code=2).stderr
    assert refused.startswith("error: schema: no schema named 'nonsense'; there are: recipe, accuracy, ")
    assert len(refused.splitlines()) == 1


@pytest.mark.parametrize("name", schema_names())
def test_every_schema_is_one_and_says_whose_it_is(llmlaunch: CommandLine, name: str) -> None:
    schema = json.loads(llmlaunch("schema", name).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "llmlaunch" in schema["title"]


def test_the_schema_of_a_cluster_takes_every_shipped_profile_and_refuses_a_misspelt_key() -> None:
    published = json.loads(asset("docs", "schemas", "cluster.schema.json").read_text(encoding="utf-8"))
    assert published == json.loads(json.dumps(cluster_schema())), "run: make docs-tables"
    validator = jsonschema.Draft202012Validator(published)
    for path in asset("slurm", "clusters").glob("*.yaml"):
        validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert not validator.is_valid({"base": "h100-80gb-x8", "devices": 8})


def test_an_older_schema_is_replaced_and_anything_else_is_left_alone(llmlaunch: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "llmlaunch.schema.json"
    said = llmlaunch("schema", "-o", path)
    assert said.stdout == ""
    assert "# yaml-language-server: $schema=llmlaunch.schema.json" in said.stderr
    whole = path.read_text()
    older = json.loads(whole)
    del older["properties"]["nodes"]
    path.write_text(json.dumps(older))
    llmlaunch("schema", "-o", path)
    assert path.read_text() == whole
    for mine in ("{}", "not json", '{"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mine"}'):
        path.write_text(mine)
        assert "is no schema of llmlaunch and is left as it is" in llmlaunch("schema", "-o", path, code=2).stderr
        assert path.read_text() == mine


def test_the_keys_have_their_meaning_and_their_words() -> None:
    keys = recipe_keys()
    assert keys["training.steps"].meaning.startswith("Optimizer steps")
    assert keys["training.precision"].words == ("bf16", "fp16", "fp32")
    assert (keys["training"].is_mapping, keys["training"].is_value) == (True, False)
    assert (keys["model"].is_mapping, keys["model"].is_value) == (True, True)
