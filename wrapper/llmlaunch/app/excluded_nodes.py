"""The nodes that failed earlier runs, as options of sbatch that keep the next run away from them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmlaunch.app.evidence import Notify
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import to_type
from llmlaunch.store.location import store_exists

if TYPE_CHECKING:
    from llmlaunch.store.sick_nodes import SickNode

__all__ = ["exclusion_options"]


def exclusion_options(run_dir: Path, notify: Notify) -> tuple[str, ...]:
    """Return options of sbatch for the run in `run_dir`; none where no node of this cluster failed earlier runs.

    Each node is announced with its reason. A store or a SLURM that does not answer must not keep anybody from
    submitting: then no node is excluded.
    """
    sick = _sick_nodes(notify) if "SBATCH_CLUSTERS" not in os.environ else []
    if not sick:
        return ()
    from llmlaunch.launchers import run_environment
    from llmlaunch.launchers.run_files import job_script
    from llmlaunch.launchers.slurm.site import cluster_name, exclusion, nodes_of_cluster

    try:
        cluster = cluster_name(notify)
        sick = [node for node in sick if node.cluster in (cluster, "")]
        listed = nodes_of_cluster(notify) if sick else None
    except UserError:  # sbatch will say it
        return ()
    if not listed:
        return ()
    chosen = exclusion([node.node for node in sick], run_environment.directives(job_script(run_dir)), listed)
    _announce([node for node in sick if node.node in chosen.names], chosen.too_few, notify)
    return chosen.words


def _sick_nodes(notify: Notify) -> list[SickNode]:
    if not store_exists():
        return []
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.sick_nodes import sick_nodes_of

    try:
        with open_collected(notify) as store:
            return sick_nodes_of(store, time.time())
    except UserError as failure:
        notify(f"warning: nodes that failed before are not left out: {failure}")
        return []


def _announce(nodes: Sequence[SickNode], too_few: bool, notify: Notify) -> None:
    for node in nodes:
        day, until = (time.strftime("%Y-%m-%d", time.localtime(at)) for at in (node.since, node.until))
        action = "would be left out, but too few nodes remain" if too_few else f"left out until {until}"
        notify(f"{node.node} {action}: {node.reason} ({node.kind}, {day}, run {node.run_id})")
    if nodes and not too_few:
        notify(f"use it again: {to_type('nodes', '--forgive', nodes[0].node)}, or submit --no-exclude")
