"""What a release of SLURM has is data, and an option it has not is refused in one sentence before sbatch is called."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.slurm.commands import features, refuse_unknown, release
from support.slurm_versions_table import table

DOCS = Path(__file__).parents[3] / "docs" / "slurm-versions.md"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("slurm-wlm 22.05.8", (22, 5)), ("slurm 25.11.0-0rc1", (25, 11)), ("no such thing", None), (None, None)],
)
def test_a_release_is_read_from_what_sbatch_prints(text: str | None, expected: tuple[int, int] | None) -> None:
    assert release(text) == expected


@pytest.mark.parametrize(
    ("option", "version", "refusal"),
    [
        ("--segment=4", "slurm 23.11.4", "sbatch --segment came with 24.05, and this site runs slurm 23.11.4"),
        ("--power=level", "slurm 24.05.1", "sbatch --power went after 23.11, and this site runs slurm 24.05.1"),
        ("--segment=4", "slurm 24.05.1", ""),
        ("--segment=4", "slurm 26.05.0", ""),
        ("--segment=4", "site build 7", ""),  # nobody can read it
    ],
)
def test_an_option_that_is_too_new_or_gone_is_refused_with_both_releases(
    option: str, version: str, refusal: str
) -> None:
    with pytest.raises(UserError) if refusal else contextlib.nullcontext() as caught:
        refuse_unknown(["--nodes=8", option], lambda: f"{version}\n")
    assert caught is None or str(caught.value).startswith(f"{refusal}; ")
    assert caught is None or "\n" not in str(caught.value)


def test_the_version_is_not_asked_for_where_no_option_depends_on_it() -> None:
    def never() -> str:
        raise AssertionError("sbatch --version was called")

    refuse_unknown(["--nodes=8", "--time=1:00:00", "-p", "gpu", "--exclusive", "--gpus-per-node=8"], never)
    refuse_unknown([], never)


def test_what_was_seen_is_what_is_said_of_each_release() -> None:
    """tests/slurm and tests/releases ask sbatch of each about its options."""
    versions = {version for feature in features() for version in feature.seen}
    for feature in features():
        assert feature.source, feature
        assert feature.option is None or {*feature.seen} == versions, feature
        for version, answer in feature.seen.items():
            here = release(version)
            assert here is not None
            has = (feature.since or here) <= here <= (feature.until or here)
            unknown = feature.since is None and feature.until is None
            assert unknown or answer == ("yes" if has else "no"), feature


def test_the_table_of_the_docs_is_made_from_the_data() -> None:
    assert table() in DOCS.read_text(encoding="utf-8")
