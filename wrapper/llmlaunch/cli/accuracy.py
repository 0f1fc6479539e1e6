"""`llmlaunch accuracy`: predicted against measured, per record and family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmlaunch.cli.planned import print_json

__all__ = ["command"]


@click.command("accuracy")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every record and family as JSON.")
def command(file: Path, as_json: bool) -> int:
    """Score the estimator on FILE, measured records as JSON lines (docs/store.md says the format)."""
    from llmlaunch.calibration.accuracy import families, score
    from llmlaunch.calibration.machines import clusters_by_gpu
    from llmlaunch.calibration.read import read_records
    from llmlaunch.report.accuracy_text import accuracy_text

    clusters = clusters_by_gpu()
    results = [score(record, clusters) for record in read_records(file)]
    summary: dict[str, Any] = families(results)
    if as_json:
        print_json({"records": [result.as_json() for result in results], "families": summary})
    else:
        click.echo(accuracy_text(summary))
    return 0
