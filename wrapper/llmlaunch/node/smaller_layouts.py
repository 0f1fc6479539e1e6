"""Training on fewer nodes than planned, with a layout that was planned for them at submit (nodes.at_least)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..rundir.values import counted, is_fallback, is_for_fewer_nodes

if TYPE_CHECKING:
    from ..rundir.run_file import RunFile, SmallerLayout


_DAY_SECONDS, _HOUR_SECONDS = 86_400.0, 3600.0


def node_counts(run: RunFile, layout: str) -> list[int]:
    """Return on how many nodes a job that has run `layout` may go on, the most first; empty where it is always as many.

    A fallback layout has none for fewer nodes: its job needs more memory than predicted.
    """
    full, fewer = run.get("nodes"), [*_layouts(run)]
    return [] if not full or not fewer or is_fallback(layout) else sorted({full, *fewer}, reverse=True)


def layout_on(run: RunFile, layout: str, nodes: int) -> str:
    """Return the layout that goes on on so many nodes after `layout`."""
    if nodes in _layouts(run):
        return _layouts(run)[nodes]["layout"]
    return "." if is_for_fewer_nodes(layout) else layout


def cost_of_fewer_nodes(run: RunFile, nodes: int, saved_step: int, held_nodes: int) -> str:
    """Return in words what it costs to go on on so many nodes of those that the job still holds, `held_nodes`; empty
    where they are as many as planned."""
    reduced = _layouts(run).get(nodes)
    if reduced is None:
        return ""
    described = run["fewer_nodes"]
    step_seconds, planned = reduced.get("step_seconds"), described.get("step_seconds")
    full = run.get("nodes") or nodes
    text = f"on {nodes} of {counted(full, 'node')} (nodes.at_least)"
    if held_nodes > nodes:
        text += f", {held_nodes - nodes} more idle"
    if step_seconds is None or planned is None:
        return text
    text += f"; a step takes {step_seconds:,.3g} s in place of {planned:,.3g}"
    steps = run.get("progress", {}).get("steps")
    if steps is None or steps <= saved_step:
        return text
    left = steps - saved_step
    text += f", {_time(left * step_seconds)} to go in place of {_time(left * planned)}"
    price = described.get("usd_per_node_hour")
    if price is None:
        return text
    dollars = price * left / _HOUR_SECONDS
    return f"{text}, ${dollars * step_seconds * held_nodes:,.0f} in place of ${dollars * planned * full:,.0f}"


def _layouts(run: RunFile) -> dict[int, SmallerLayout]:
    """The layouts of run.json for fewer nodes, by their number."""
    layouts = run.get("fewer_nodes", {}).get("layouts", [])
    return {
        nodes: layout
        for layout in layouts
        if (nodes := layout.get("nodes", 0)) and layout.get("layout") == f"nodes/{nodes}"
    }


def _time(seconds: float) -> str:
    if seconds >= 2 * _DAY_SECONDS:
        return f"{seconds / _DAY_SECONDS:.1f} days"
    return f"{seconds / _HOUR_SECONDS:.1f} h" if seconds >= _HOUR_SECONDS else f"{seconds / 60.0:.0f} min"
