"""The table of docs/slurm-versions.md, made from slurm/versions.json; test_slurm_versions.py keeps the two equal.

`PYTHONPATH=tests python -m support.slurm_versions_table` prints it.
"""

from __future__ import annotations

from llmlaunch.launchers.slurm.commands import features, release_text


def table() -> str:
    """Return the features as a Markdown table, with what was seen in each version that was run."""
    versions = sorted({version for feature in features() for version in feature.seen})
    rows = [f"| | since | until | {' | '.join(versions)} | |", "|---" * (4 + len(versions)) + "|"]
    for feature in features():
        seen = [feature.seen.get(version, "") for version in versions]
        cells = [feature.feature, release_text(feature.since), release_text(feature.until), *seen, feature.note]
        rows.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
