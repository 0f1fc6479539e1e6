"""Paths on the command line start where a person types them; paths in a recipe start where it lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.app.planned_run import plan
from llmlaunch.app.rendered_job import rendered_recipe
from llmlaunch.documents.keys import dotted_keys
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.overrides import PATHS, from_working_directory
from llmlaunch.recipe.types import recipe_form
from support.recipes import recipe_text

CONFIG = '{"model_type": "llama", "num_hidden_layers": %d}'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose recipes lie in a folder of their own, and which is the working directory."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(recipe_text(), encoding="utf-8")
    for folder, layers in ((tmp_path, 2), (tmp_path / "recipes", 4)):
        (folder / "tiny").mkdir()
        (folder / "tiny" / "config.json").write_text(CONFIG % layers, encoding="utf-8")
        (folder / "site.yaml").write_text(f"base: h100-80gb-x8\nslurm: {{partition: p{layers}}}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("spelling", ["./tiny", "tiny", "tiny/config.json", "recipes/../tiny"])
def test_a_model_in_an_override_lies_in_the_working_directory(project: Path, spelling: str) -> None:
    assert load_recipe("recipes/mine.yaml", [f"model={spelling}"]).model.num_layers == 2


def test_a_model_in_the_file_lies_beside_it(project: Path) -> None:
    Path("recipes/mine.yaml").write_text(recipe_text(model="./tiny"), encoding="utf-8")
    assert load_recipe("recipes/mine.yaml").model.num_layers == 4


def test_a_model_in_the_file_that_lies_elsewhere_is_answered_with_where(project: Path) -> None:
    (project / "tiny").rename(project / "small")
    Path("recipes/mine.yaml").write_text(recipe_text(model="small"), encoding="utf-8")
    with pytest.raises(UserError, match=r"'small': is in the working directory.* did you mean model: \.\./small\?"):
        load_recipe("recipes/mine.yaml")


def test_names_stay_names(project: Path) -> None:
    words = ("model=llama3-8b", "model=meta-llama/Llama-3.1-8B", "cluster=h100-80gb-x8", "nodes=4", "no override")
    assert from_working_directory(words) == words
    images = ("container.image=nvcr.io/nvidia/nemo:25.01", "container.image=docker://x/y", "data.tokenizer=org/name")
    assert from_working_directory(images) == images
    absolute = ("data.path=/data/tokens", "code.path=~/trainer")
    assert from_working_directory(absolute) == absolute


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("cluster=./site.yaml", "cluster={}/site.yaml"),
        ("data.path=tokens/en", "data.path={}/tokens/en"),
        ("data.cache_path=../cache", "data.cache_path={parent}/cache"),
        ("backend.path=Megatron-LM", "backend.path={}/Megatron-LM"),
        ("container.image=./x.sqsh", "container.image={}/x.sqsh"),
        ("data={path: tokens/en, split: '99,1,0'}", 'data={{"path": "{}/tokens/en", "split": "99,1,0"}}'),
        ("data.blend=[{path: a, weight: 1}]", 'data.blend=[{{"path": "{}/a", "weight": 1}}]'),
        ("data.blend.0.path=a", "data.blend.0.path={}/a"),
        ("model={base: ./tiny, num_layers: 8}", 'model={{"base": "{}/tiny", "num_layers": 8}}'),
        ("data.path='a: b'", 'data.path="{}/a: b"'),
        ("training.checkpoint_path=ckpt-{{run}}", "training.checkpoint_path={}/ckpt-{{run}}"),
    ],
)
def test_a_relative_path_becomes_absolute(project: Path, word: str, expected: str) -> None:
    word = word.replace("{{", "{").replace("}}", "}")
    assert from_working_directory([word]) == (expected.format(project, parent=project.parent),)


def test_rows_of_the_hub_are_named_unless_there_is_such_a_file(project: Path) -> None:
    (named,) = from_working_directory(["data={path: org/answers, format: chat}"])
    assert named == "data={path: org/answers, format: chat}"
    words = ("data.path=org/answers", "data.format=chat")
    assert from_working_directory(words) == words
    (project / "org").mkdir()
    (project / "org" / "answers").mkdir()
    assert from_working_directory(words)[0] == f"data.path={project}/org/answers"


def test_every_key_named_as_a_path_is_a_key_of_recipes() -> None:
    known = dotted_keys(recipe_form())
    assert [key for key in PATHS if key.replace(".*", "") not in known] == []


def test_a_run_means_the_same_files_from_everywhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan("recipes/mine.yaml", ["model=./tiny", "cluster=./site.yaml", "data={path: tokens}", "nodes=1"])
    run.write(project / "run", print)
    (stored,) = [word for word in json.loads((project / "run/run.json").read_text())["overrides"] if "model" in word]
    assert stored == f"model={project}/tiny"
    monkeypatch.chdir("/")
    again = rendered_recipe(project / "run")
    assert again.model.num_layers == 2
    assert again.slurm["partition"] == "p2"
    assert again.data.path == f"{project}/tokens"
    assert again.digest == run.recipe.digest


def test_the_digest_is_the_same_from_wherever_it_is_typed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = load_recipe("recipes/mine.yaml", ["data={path: tokens}"]).digest
    monkeypatch.chdir(project / "recipes")
    assert load_recipe("mine.yaml", ["data={path: ../tokens}"]).digest == here


def test_a_path_that_is_not_there_is_named_as_it_was_looked_for(project: Path) -> None:
    with pytest.raises(UserError, match=f"{project}/absent: cannot be read|{project}/absent.*No such file"):
        load_recipe("recipes/mine.yaml", ["model=./absent"])
