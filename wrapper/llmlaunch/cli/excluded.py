"""The nodes that ended earlier runs, as words for sbatch that keep the next one from them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmlaunch.cli.printed import say
from llmlaunch.errors import UserError
from llmlaunch.rundir.messages import to_type
from llmlaunch.store.location import store_exists

if TYPE_CHECKING:
    from llmlaunch.store.sick_nodes import SickNode

__all__ = ["excluded_words"]


def excluded_words(run_dir: Path) -> tuple[str, ...]:
    """Options of sbatch for the run in `run_dir`; none where no node of this cluster is known to be sick.

    Each node is named on stderr with its reason. A store or a SLURM that does not answer must not keep anybody from
    submitting: then no node is left out.
    """
    sick = _known_sick() if "SBATCH_CLUSTERS" not in os.environ else []
    if not sick:
        return ()
    from llmlaunch.launchers import environment
    from llmlaunch.launchers.run_files import job_script
    from llmlaunch.launchers.slurm.nodes import cluster_name, exclusion, nodes_of_cluster

    try:
        here = cluster_name(_say)
        sick = [one for one in sick if one.cluster in (here, "")]
        listed = nodes_of_cluster(_say) if sick else None
    except UserError:  # sbatch will say it
        return ()
    if not listed:
        return ()
    script = job_script(run_dir)
    chosen = exclusion([one.node for one in sick], environment.directives(script), listed)
    _tell([one for one in sick if one.node in chosen.names], chosen.too_few)
    return chosen.words


def _known_sick() -> list[SickNode]:
    if not store_exists():
        return []
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.sick_nodes import sick_nodes_of

    try:
        with open_collected(_say) as store:
            return sick_nodes_of(store, time.time())
    except UserError as failure:
        say(f"warning: nodes that failed before are not left out: {failure}", err=True)
        return []


def _tell(named: Sequence[SickNode], too_few: bool) -> None:
    for one in named:
        day, until = (time.strftime("%Y-%m-%d", time.localtime(at)) for at in (one.since, one.until))
        what = "would be left out, but too few nodes remain" if too_few else f"left out until {until}"
        _say(f"{one.node} {what}: {one.reason} ({one.kind}, {day}, run {one.run_id})")
    if named and not too_few:
        _say(f"use it again: {to_type('nodes', '--forgive', named[0].node)}, or submit --no-exclude")


def _say(line: str) -> None:
    say(line, err=True)
