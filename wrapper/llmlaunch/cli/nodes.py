"""`llmlaunch nodes`: the nodes that ended runs and are left out of the next ones, and those that are suspected."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.output import notify, print_json, say, say_next_of_table
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.store.location import store_exists

if TYPE_CHECKING:
    from llmlaunch.store.sick_nodes import SickNode


HEAD = ("node", "cluster", "what", "since", "left out until", "failures", "run", "reason")
SUSPECTS_HEAD = ("suspected", "cluster", "what", "since", "forgotten on", "run", "reason")


@click.command("nodes")
@click.option("--forgive", metavar="NODE", help="Use NODE again: forget what it did so far.")
@click.option("--cluster", metavar="NAME", help="Only of this cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print the nodes as JSON.")
def nodes_command(forgive: str | None, cluster: str | None, as_json: bool) -> int:
    """List the nodes that submit leaves out, why, and until when, and the nodes that are suspected. Runs that have
    finished since are collected first.

    A node is left out for a week after it ended a run, twice as long with each further one, at most 60 days. Where only
    one sign points at it, as after a hang, it is suspected, and a second sign within two weeks leaves it out.

    \b
    llmlaunch nodes
    llmlaunch nodes --forgive n042
    """
    with waiting_for("collecting finished runs"):
        sick, suspects = _collected(forgive, cluster)
    if as_json:
        listed = (("nodes", sick), ("suspects", suspects))
        print_json({name: [node.as_json() for node in nodes] for name, nodes in listed})
        return 0
    if not sick:
        notify("no node is left out")
    _print(sick, suspects)
    if sick or suspects:
        say_next_of_table((to_type("nodes", "--forgive", (sick or suspects)[0].node), "once it is mended"))
    else:
        say_next_of_table((to_type("runs"), "what became of the runs"))
    return 0


def _collected(forgiven: str | None, cluster: str | None) -> tuple[list[SickNode], list[SickNode]]:
    """The nodes that are left out, and those that are suspected."""
    if not store_exists():
        if forgiven is not None:
            raise UserError(f"nodes: {forgiven}: no run has failed on it; there is no store yet")
        return [], []
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.sick_nodes import forgive, sick_nodes_of, suspects_of

    with open_collected(notify) as store:
        if forgiven is not None:
            count = forgive(store, forgiven, time.time(), cluster)
            if count == 0:
                raise UserError(f"nodes: {forgiven}: no run has failed on it that is not forgiven yet")
            notify(f"{forgiven}: {counted(count, 'failure')} forgiven; jobs may run there")
        clusters = None if cluster is None else [cluster]
        return sick_nodes_of(store, time.time(), clusters), suspects_of(store, time.time(), clusters)


def _print(sick: list[SickNode], suspects: list[SickNode]) -> None:
    from llmlaunch.report.text import one_line, table

    for head, nodes in ((HEAD, sick), (SUSPECTS_HEAD, suspects)):
        rows = []
        for node in nodes:
            days = (time.strftime("%Y-%m-%d", time.localtime(at)) for at in (node.since, node.until))
            failures = (str(node.failures),) if node.failures else ()
            texts = (node.node, node.cluster or "-", node.kind, *days, *failures, node.run_id, node.reason)
            rows.append([one_line(text) for text in texts])
        if rows:
            say(table(head, rows, indent=""))
