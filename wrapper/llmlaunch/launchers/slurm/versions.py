"""What a release of SLURM has and what not: slurm/versions.json, and the table of docs/slurm-versions.md made from it.

python -m llmlaunch.launchers.slurm.versions        prints the table
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmlaunch.assets import asset
from llmlaunch.errors import UserError

__all__ = ["Feature", "features", "refuse_unknown", "release", "table"]

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
    return [Feature(**one | {"since": release(one["since"]), "until": release(one["until"])}) for one in listed]


def release(text: str | None) -> Release | None:
    """`slurm-wlm 22.05.8` or `24.11` -> (22, 5), (24, 11); None where no release is named."""
    match = re.search(r"(\d{2})\.(\d{2})", text or "")
    return (int(match[1]), int(match[2])) if match else None


def refuse_unknown(words: Sequence[str], version: Callable[[], str]) -> None:
    """Raise UserError for an option of sbatch this site's SLURM does not have.

    `words` are the options of a script and a command line; `version()` what `sbatch --version` prints, asked only
    where an option is among them that came or went.
    """
    given = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    doubtful = [one for one in features() if one.option in given and not one.everywhere]
    if not doubtful:
        return
    said = version().strip()
    here = release(said)
    if here is None:
        return
    for one in doubtful:
        too_old = one.since is not None and here < one.since
        too_new = one.until is not None and here > one.until
        if too_old or too_new:
            when = f"came with {_shown(one.since)}" if too_old else f"went after {_shown(one.until)}"
            raise UserError(
                f"sbatch --{one.option} {when}, and this site runs {said}; leave it out (slurm: in the recipe or the "
                "cluster profile, or the words after --)"
            )


def table() -> str:
    """The features as a Markdown table."""
    rows = ["| | since | until | checked | |", "|---|---|---|---|---|"]
    for one in features():
        rows.append(
            f"| {one.feature} | {_shown(one.since)} | {_shown(one.until)} | {one.checked} | {one.note} |".replace(
                "  ", " "
            )
        )
    return "\n".join(rows)


def _shown(of: Release | None) -> str:
    return "" if of is None else f"{of[0]}.{of[1]:02}"


if __name__ == "__main__":
    print(table())
