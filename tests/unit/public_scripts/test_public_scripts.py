"""Scripts that people publish, typed as they are, get the figure of the same job written by hand, or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.public_scripts import PublicScript, outcome_of, public_scripts, written_bytes

NOT_YET: dict[str, str] = {}
"""Scripts that are not answered right, with the reason. Each must still be wrong, so that the list shrinks."""

MISREAD: frozenset[str] = frozenset()
"""Those of them that get a wrong figure and no word of doubt."""


@pytest.mark.parametrize("script", public_scripts(), ids=lambda script: script.name)
def test_a_public_script_has_its_right_answer(
    script: PublicScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    outcome = outcome_of(script, tmp_path)
    if script.name in NOT_YET:
        assert not outcome.right, f"{script.name} is answered right: take it out of NOT_YET"
    else:
        assert outcome.right, outcome
    assert outcome.misread == (script.name in MISREAD), outcome


def test_the_lists_of_what_is_wrong_name_scripts_that_exist() -> None:
    assert set(NOT_YET) <= {script.name for script in public_scripts()}
    assert set(NOT_YET) >= MISREAD


@pytest.mark.parametrize("script", public_scripts(), ids=lambda script: script.name)
def test_an_answer_names_its_source_and_is_a_refusal_or_a_recipe_with_a_figure(
    script: PublicScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    source = script.answer["source"]
    assert all(source[key] for key in ("repository", "path", "read")), source
    assert ("recipe" in script.answer) != ("refused" in script.answer)
    if "recipe" in script.answer:
        assert written_bytes(script, tmp_path) > 0
