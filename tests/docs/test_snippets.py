"""No snippet of the documentation is unchecked: it runs, or it parses; a command or key that is gone fails here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from llmlaunch.cluster.load import load_cluster
from llmlaunch.recipe.load import load_recipe
from support.recipe_keys import reference_table
from support.recipes import ON_FOUR_NODES
from support.snippets import (
    DOCS,
    LANGUAGES,
    ROOT,
    Snippet,
    command_mistake,
    commands,
    named_options_mistake,
    snippets_of,
)

SKILL = DOCS / "skills" / "llmlaunch" / "SKILL.md"
# Each snippet of these says where it runs: they are what a newcomer types.
TYPED = [
    ROOT / "README.md",
    *(DOCS / name for name in ("tutorial.md", "first-megatron-job.md", "first-deepspeed-job.md", "qualify.md")),
    SKILL,
]
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", SKILL])
SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]
KEYS = re.findall(r"^\| `([\w.]+)`", reference_table(), re.MULTILINE)
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def of(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each.language in languages], ids=str)


@of(*{snippet.language for snippet in SNIPPETS})
def test_every_snippet_names_its_language_and_in_a_tutorial_where_it_runs(snippet: Snippet) -> None:
    assert snippet.language in LANGUAGES
    assert snippet.place in ("", "here", "slurm", "elsewhere")
    if snippet.page in TYPED and snippet.language != "text":
        assert snippet.place or snippet.file, "say how it is checked: see tests/support/snippets.py"


@of("sh", "diff")
def test_every_command_is_one_that_llmlaunch_takes(snippet: Snippet) -> None:
    lines = re.sub(r"(?m)^-.*|^\+", "", snippet.text) if snippet.language == "diff" else snippet.text
    for words in commands(lines):
        assert command_mistake(words) == "", words
        for key in (word.partition("=")[0] for word in words if re.match(r"[a-z_]+(\.[\w]+)*=", word)):
            if words[0] in ("check", "plan", "render", "submit", "compare"):
                assert any(f"{known}.".startswith(f"{key}.") or f"{key}.".startswith(f"{known}.") for known in KEYS), (
                    key
                )
    assert set(re.findall(r"(?m)^make ([a-z-]+)", lines)) <= set(TARGETS)


@of("text")
def test_every_command_of_a_synopsis_is_there_with_its_options(snippet: Snippet) -> None:
    for line in snippet.text.splitlines():
        if line.removeprefix("$ ").startswith("llmlaunch "):
            assert named_options_mistake(line) == "", line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_sentence_names_is_there_with_its_options(page: Path) -> None:
    prose = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text("utf-8"))
    for mention in re.findall(r"`(llmlaunch [^`]+)`", prose):
        assert named_options_mistake(mention) == "", mention


@of("yaml")
def test_every_piece_of_a_recipe_or_profile_is_valid(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = yaml.safe_load(snippet.text)
    if "base" in piece:
        for other in snippets_of(snippet.page):
            if other.file:
                (tmp_path / other.file).write_text(other.text)
        assert load_cluster(piece, tmp_path).name
        return
    (tmp_path / "ours.yaml").write_text("base: h100-80gb-x8\n")  # what a person's `init --site` wrote
    for name in piece.get("secrets", []):
        monkeypatch.setenv(name, "secret")
    whole = {key: yaml.safe_load(value) for key, value in ON_FOUR_NODES.items()}
    merged = whole | {
        key: {**whole[key], **value} if isinstance(whole.get(key), dict) else value for key, value in piece.items()
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(piece if "schema" in piece else merged))
    assert load_recipe(recipe).name


@of("json")
def test_every_piece_of_json_is_json(snippet: Snippet) -> None:
    assert json.loads(snippet.text)


@of("python")
def test_every_piece_of_python_compiles(snippet: Snippet) -> None:
    compile(snippet.text, str(snippet), "exec")
