"""What `llmlaunch init` writes: the recipe of the gallery, explained, with what a real job needs one "# " away."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from llmlaunch.app.gallery import gallery
from llmlaunch.app.starter import starter_text
from llmlaunch.assets import asset
from llmlaunch.cluster.profile_text import SiteOffer, offer_of
from llmlaunch.cluster.slurm_site import Partition, read_site
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.command_line import CommandLine
from support.slurm_answers import SLURM_22_05, SLURM_23_11

NAMES = sorted(gallery())
SCHEMA = jsonschema.Draft202012Validator(json.loads(asset("docs", "schemas", "recipe.schema.json").read_text("utf-8")))


def starter(name: str, offer: SiteOffer | None = None) -> str:
    return starter_text(gallery()[name], Path(f"{name}.yaml"), offer)


def for_real(text: str) -> str:
    """The starter as a person leaves it who takes every "# " off a key and puts a path in place of made-up data."""
    uncommented = re.sub(r"^( *)# (?=(?:  )?[a-z_]+:)", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"^  (mock|python_source): .*\n", "", uncommented, flags=re.MULTILINE)


def recipe_of_text(text: str, folder: Path) -> Recipe:
    (folder / "starter.yaml").write_text(text, encoding="utf-8")
    return load_recipe(folder / "starter.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_a_starter_means_what_its_recipe_of_the_gallery_means(name: str, tmp_path: Path) -> None:
    assert recipe_of_text(starter(name), tmp_path).digest == load_recipe(gallery()[name]).digest


@pytest.mark.parametrize("name", NAMES)
def test_a_starter_says_what_it_is_what_each_line_means_and_what_its_editor_checks(name: str) -> None:
    text = starter(name)
    lines = text.splitlines()
    assert lines[0] == "# yaml-language-server: $schema=llmlaunch.schema.json"
    assert lines[1] == gallery()[name].read_text(encoding="utf-8").splitlines()[0]
    own = gallery()[name].read_text(encoding="utf-8").splitlines()
    assert max(len(line) for line in lines if line not in own) <= 100
    assert text.endswith("\n")
    assert "To train for real" in text
    for line in ("schema: 1", "name: ", "nodes: ", "layout: "):
        at = next(number for number, written in enumerate(lines) if written.startswith(line))
        assert "#" in lines[at] or lines[at - 1].startswith("#")
    SCHEMA.validate(yaml.safe_load(text))


@pytest.mark.parametrize("name", NAMES)
def test_every_key_for_a_real_job_is_one_and_stays_a_recipe_without_its_hash(name: str, tmp_path: Path) -> None:
    text = for_real(starter(name))
    SCHEMA.validate(yaml.safe_load(text))
    recipe = recipe_of_text(text, tmp_path)
    assert recipe.training.checkpoint_path is not None
    assert recipe.data.path is not None
    assert not recipe.data.mock
    assert recipe.container is not None
    assert recipe.python == "/shared/venvs/training/bin/python"
    assert {"partition", "account", "time"} <= set(recipe.slurm)
    if recipe.backend.name == "megatron-lm":
        assert recipe.backend.path == "/opt/Megatron-LM"


@pytest.mark.parametrize("name", ["llama3-8b", "quickstart"])
def test_the_recipe_of_a_real_job_is_planned_and_safe(name: str, tmp_path: Path, llmlaunch: CommandLine) -> None:
    recipe_of_text(for_real(starter(name)), tmp_path)
    assert llmlaunch.json("check", tmp_path / "starter.yaml")["verdict"] == "safe"


def test_what_slurm_says_is_filled_in_where_the_cards_are_those_of_the_recipe(tmp_path: Path) -> None:
    offer = offer_of(read_site(SLURM_22_05), "h100-80gb-x8")
    text = starter("llama3-8b", offer)
    assert "# Here SLURM shows 4 nodes in train with 8 GPUs, which SLURM calls h100." in text
    recipe = recipe_of_text(text, tmp_path)
    assert recipe.slurm["partition"] == "train"
    assert recipe.cluster == load_recipe(gallery()["llama3-8b"]).cluster
    assert "\ncluster: h100-80gb-x8 " in text


def test_other_cards_become_the_profile_that_fits_them_and_a_small_site_is_said(tmp_path: Path) -> None:
    offer = offer_of(read_site(SLURM_22_05), "a100-40gb-x8")
    other = starter("llama3.1-8b-a100-40gb", offer)
    assert recipe_of_text(other, tmp_path).cluster.accelerator.name == "h100-80gb"
    assert re.search(r"^cluster: h100-80gb-x8 +# as SLURM shows this site; the gallery's: a100-40gb-x8$", other, re.M)
    large = starter("llama3-70b", offer_of(read_site(SLURM_22_05), "h100-80gb-x8"))
    assert "# The recipe asks for 64 nodes; nodes: auto finds the fewest that fit." in large


def test_of_two_kinds_of_cards_the_one_of_the_recipe_is_offered() -> None:
    site = read_site(SLURM_23_11)
    assert [getattr(offer_of(site, f"{name}-x8"), "base", None) for name in ("h200-141gb", "h100-80gb")] == [
        "h200-141gb-x8",
        "h100-80gb-x8",
    ]


def test_boards_of_four_and_cards_nobody_knows(tmp_path: Path) -> None:
    four = SiteOffer("a100", "a100-40gb-x8", "look", 4, 6, None, ("physics",))
    recipe = recipe_of_text(starter("llama3.1-8b-a100-40gb", four), tmp_path)
    assert recipe.cluster.devices_per_node == 4
    assert recipe.slurm["account"] == "physics"
    unknown = SiteOffer("mi300", None, "", 8, 6, None, ("a", "b"))
    text = starter("llama3-8b", unknown)
    assert recipe_of_text(text, tmp_path).cluster == load_recipe(gallery()["llama3-8b"]).cluster
    assert "No shipped profile is known for them: llmlaunch init --site drafts one." in text
    assert "# Your accounts: a, b." in text


def test_what_a_site_calls_its_things_stays_text() -> None:
    odd = Partition('gpu: "x"\nmodel: evil', True, "1:00:00\nnodes: 99", "", "", "", False)
    offer = SiteOffer("h100\nnodes: 99", "h100-80gb-x8", "", 8, 4, odd, ("yes",))
    document = yaml.safe_load(starter("llama3-8b", offer))
    assert (document["slurm"]["partition"], document["slurm"]["account"]) == (odd.name, "yes")
    assert (document["nodes"], document["model"]) == (4, "llama3-8b")
