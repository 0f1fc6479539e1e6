"""The table of docs/slurm-versions.md, made from slurm/versions.json; test_slurm_versions.py keeps the two equal.

`PYTHONPATH=tests python -m support.slurm_versions_table` prints it.
"""

from __future__ import annotations

from llmlaunch.launchers.slurm.commands import features, release_text

__all__ = ["table"]


def table() -> str:
    """Return the features as a Markdown table."""
    rows = ["| | since | until | checked | |", "|---|---|---|---|---|"]
    for feature in features():
        since, until = release_text(feature.since), release_text(feature.until)
        row = f"| {feature.feature} | {since} | {until} | {feature.checked} | {feature.note} |"
        rows.append(row.replace("  ", " "))
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
