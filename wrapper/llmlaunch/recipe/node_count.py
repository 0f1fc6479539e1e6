"""How many nodes a job has, and with how few it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from llmlaunch.documents.keys import key, section

__all__ = ["AUTO_NODES", "MOST_NODES", "NodeCount", "NodeRange", "Nodes"]

MOST_NODES = 100_000
AUTO_NODES = 0  # a recipe whose number of nodes the planner has not chosen yet

NodeCount = Annotated[int, Field(ge=1, le=MOST_NODES)]


def _nodes(value: Any, check: ValidatorFunctionWrapHandler) -> int:
    nodes: int = AUTO_NODES if value == "auto" and isinstance(value, str) else check(value)
    return nodes


Nodes = Annotated[
    NodeCount,
    WrapValidator(_nodes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_NODES}, {"const": "auto"}]}),
]


@section
class NodeRange:
    """How many nodes train, and with how few the job goes on where it has lost some and no spare node is left."""

    count: int = key("Number of nodes", written=NodeCount)
    at_least: int | None = key(
        "Go on with so few nodes in the same allocation, with a layout planned at submit, rather than back to the "
        "queue; absent = with all of them only",
        default=None,
        written=NodeCount | None,
    )

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where the fewest nodes are not fewer."""
        fewest = keys.get("at_least")
        if fewest is not None and fewest >= keys["count"]:
            raise ValueError(f"at_least: {fewest} is not fewer than count: {keys['count']}; lower it, or leave it out")
