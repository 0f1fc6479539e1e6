"""What a release of SLURM has is data, and an option it has not is refused in one sentence before sbatch is called."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.slurm.commands import features, refuse_unknown, release
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
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


# Stands for sbatch of a release, which may not allow an expedited requeue.
SBATCH = """\
#!/bin/bash
[[ $* != --version ]] || exec echo "{version}"
if [[ -n ${{SBATCH_REQUEUE:-}} && {allowed} = no ]]; then
  echo "sbatch: error: Batch job submission failed: Requested operation not supported on this system" >&2
  exit 1
fi
printf '%s' "${{SBATCH_REQUEUE:-usual}}" >"$0.requeue"
echo 4711
"""


@pytest.mark.parametrize(
    ("version", "allowed", "requeue", "message"),
    [
        ("slurm 26.05.5", "yes", "expedite", None),
        ("slurm 26.05.5", "no", "usual", "this site does not allow slurm.requeue: expedite"),
        ("slurm 22.05.8", "no", "usual", "came with SLURM 25.11, and this site runs slurm 22.05.8"),
    ],
)
def test_an_expedited_requeue_is_asked_for_where_the_site_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, allowed: str, requeue: str, message: str | None
) -> None:
    (tmp_path / "sbatch").write_text(SBATCH.format(version=version, allowed=allowed))
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"schema": 1, "restart": {"by": "requeue", "expedite": True}}))
    (run / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --requeue\n")
    messages: list[str] = []
    assert SlurmLauncher(say=messages.append).submit(run).job_id == "4711"
    assert (tmp_path / "sbatch.requeue").read_text() == requeue
    assert (message or "") in " ".join(messages)
    assert len(messages) == (message is not None)


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
