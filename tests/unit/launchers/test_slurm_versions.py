"""What a release of SLURM has is data, and an option it has not is refused in one sentence before sbatch is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.slurm.commands import features, refuse_unknown, release
from support.slurm_versions_table import table

DOCS = Path(__file__).parents[3] / "docs" / "slurm-versions.md"


def answer(version: str) -> Callable[[], str]:
    return lambda: f"slurm {version}\n"


def test_a_release_is_read_from_what_sbatch_prints() -> None:
    assert release("slurm-wlm 22.05.8") == (22, 5)
    assert release("slurm 25.11.0-0rc1") == (25, 11)
    assert release("no such thing") is None
    assert release(None) is None


def test_an_option_that_is_too_new_is_refused_with_both_releases() -> None:
    options = ["--nodes=8", "--segment=4"]
    with pytest.raises(UserError) as refusal:
        refuse_unknown(options, answer("23.11.4"))
    assert "sbatch --segment came with 24.05, and this site runs slurm 23.11.4" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    refuse_unknown(options, answer("24.05.1"))
    refuse_unknown(options, answer("26.05.0"))


def test_an_option_that_is_gone_is_refused() -> None:
    with pytest.raises(UserError, match=r"sbatch --power went after 23\.11"):
        refuse_unknown(["--power=level"], answer("24.05.1"))


def test_the_version_is_not_asked_for_where_no_option_depends_on_it() -> None:
    def never() -> str:
        raise AssertionError("sbatch --version was called")

    refuse_unknown(["--nodes=8", "--time=1:00:00", "-p", "gpu", "--exclusive", "--gpus-per-node=8"], never)
    refuse_unknown([], never)


def test_a_version_nobody_can_read_refuses_nothing() -> None:
    refuse_unknown(["--segment=4"], lambda: "site build 7")


def test_every_entry_says_how_it_is_known() -> None:
    for feature in features():
        assert feature.checked in ("run here", "read"), feature
        assert feature.source, feature
        assert feature.checked == "read" or "22.05.8" in feature.source, feature


def test_the_table_of_the_docs_is_made_from_the_data() -> None:
    assert table() in DOCS.read_text(encoding="utf-8")
