"""Where the program of a node is: the run, its attempt, the layout, and this node among the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.file_names import attempt_folder
from .node_environment import NodeError
from .node_ranks import Team, environment_number

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


class StoppedEarly(NodeError):
    """The node was told to stop before its ranks were started."""


def node_name(environment: Mapping[str, str]) -> str:
    return environment.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


class NodePlace(NamedTuple):
    """Where this program is: the run, its attempt, the layout, and this node among the others."""

    run_directory: Path
    layout: Path
    attempt: str
    node: str
    node_rank: int
    nodes: int
    devices: int
    address: str  # where rank 0 listens
    skip: str = ""  # ranges of steps whose batches are left out

    @classmethod
    def of(cls, options: argparse.Namespace, devices: int, environment: Mapping[str, str]) -> NodePlace:
        number = environment_number(environment, "SLURM_NODEID")  # SLURM's, or what the job made of it
        ranks = options.node_ranks.split(",") if options.node_ranks else []
        node = node_name(environment)
        node_rank = int(ranks[number]) if ranks else number
        layout = options.run_dir / options.layout
        team = (node_rank, options.nodes, devices, options.address)
        return cls(options.run_dir, layout, options.attempt, node, *team, options.skip)

    @property
    def folder(self) -> Path:
        """The attempt's."""
        return attempt_folder(self.run_directory, self.attempt)

    def team(self, port: int) -> Team:
        return Team(self.node_rank, self.nodes, self.devices, self.address, str(port), self.attempt)
