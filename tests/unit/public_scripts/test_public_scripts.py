"""Scripts that people publish, typed as they are, get the figure of the same job written by hand, or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.plans import ADVICE_LIMITS, spend
from support.public_scripts import PublicScript, outcome_of, public_scripts
from support.soak import share

SCRIPTS = public_scripts()


@pytest.mark.parametrize("script", share(SCRIPTS, SCRIPTS[1::6]), ids=lambda script: script.name)
def test_a_public_script_has_the_right_answer_whose_source_is_named(
    script: PublicScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend(monkeypatch, ADVICE_LIMITS)  # of a job that does not fit, only the figure is compared
    source = script.answer["source"]
    assert all(source[key] for key in ("repository", "path", "read")), source
    assert ("recipe" in script.answer) != ("refused" in script.answer)
    outcome = outcome_of(script, tmp_path)
    assert outcome.right, outcome
