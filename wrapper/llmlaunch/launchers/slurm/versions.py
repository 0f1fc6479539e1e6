"""What each release of SLURM has and lacks, from slurm/versions.json (docs/slurm-versions.md shows it as a table)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmlaunch.assets import asset
from llmlaunch.errors import UserError

__all__ = ["Feature", "features", "refuse_unknown", "release", "release_text"]

Release = tuple[int, int]

OLDEST: Release = (20, 2)
"""The first that has `squeue --me` and `-O FIELD:SUFFIX`, which the launcher asks with."""


@dataclass(frozen=True)
class Feature:
    """One thing that came, went or changed. `option` is the long option of sbatch it is about, if any; `since` and
    `until` are the first and the last release that has it, None where that is before 19.05, or not yet.
    `checked` is "run here" (seen with 22.05.8) or "read" (in `source`)."""

    feature: str
    option: str | None
    since: Release | None
    until: Release | None
    checked: str
    source: str
    note: str = ""

    @property
    def everywhere(self) -> bool:
        """Every release the launcher works with has it."""
        return self.until is None and (self.since is None or self.since <= OLDEST)


def features() -> list[Feature]:
    """The entries of slurm/versions.json."""
    listed = json.loads(asset("slurm", "versions.json").read_text(encoding="utf-8"))["features"]
    return [Feature(**entry | {"since": release(entry["since"]), "until": release(entry["until"])}) for entry in listed]


def release(text: str | None) -> Release | None:
    """`slurm-wlm 22.05.8` or `24.11` -> (22, 5), (24, 11); None where no release is named."""
    match = re.search(r"(\d{2})\.(\d{2})", text or "")
    return (int(match[1]), int(match[2])) if match else None


def refuse_unknown(arguments: Sequence[str], version: Callable[[], str]) -> None:
    """Raise UserError for an option of sbatch this site's SLURM does not have.

    `arguments` are the options of a script and a command line; `version()` what `sbatch --version` prints, asked only
    where an option is among them that came or went.
    """
    used = {word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
    doubtful = [feature for feature in features() if feature.option in used and not feature.everywhere]
    if not doubtful:
        return
    version_text = version().strip()
    here = release(version_text)
    if here is None:
        return
    for feature in doubtful:
        too_old = feature.since is not None and here < feature.since
        too_new = feature.until is not None and here > feature.until
        if too_old or too_new:
            when = (
                f"came with {release_text(feature.since)}" if too_old else f"went after {release_text(feature.until)}"
            )
            raise UserError(
                f"sbatch --{feature.option} {when}, and this site runs {version_text}; remove it (slurm: in the recipe "
                "or the cluster profile, or the arguments after --)"
            )


def release_text(version: Release | None) -> str:
    return "" if version is None else f"{version[0]}.{version[1]:02}"
