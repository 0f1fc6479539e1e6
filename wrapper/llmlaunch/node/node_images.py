"""The image of a registry on the nodes of a job: pyxis would import it in each step, in that step's time. So a step of
its own imports it once on each node, and the container that it leaves there is removed in the end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from .containers import StepContainer

IMPORT_SECONDS = 3600.0
REMOVE_SECONDS, REMOVE_LATE_SECONDS = 120.0, 20.0  # the latter where the job's time is nearly up
_IMPORTED = "imported"


class StepRunner(NamedTuple):
    """How a step beside the training is run: `srun` returns its words for nodes and a log (%N is the node), `run` runs
    them for so many seconds at most."""

    srun: Callable[[Sequence[str], str, str], list[str]]
    run: Callable[[Sequence[str], float], None]


class NodeImages:
    """`ready` are the nodes that have the image."""

    def __init__(self, container: StepContainer, job_id: str, steps: StepRunner) -> None:
        self.ready: set[str] = set()
        self.image = container.image
        self._container, self._job_id, self._steps = container, job_id, steps

    def bring_to(self, nodes: Collection[str], folder: Path, seconds: float) -> None:
        """Import the image on these nodes. What pyxis says is in `folder`, a log for each."""
        folder.mkdir(exist_ok=True)
        srun = self._srun(sorted(nodes), folder)
        self._container.remove(srun, self._job_id, REMOVE_SECONDS)
        self._steps.run([*srun, *self._container.import_options(), "sh", "-c", f"echo {_IMPORTED}"], seconds)
        for node in nodes:
            with contextlib.suppress(OSError):
                log = (folder / f"{node}.log").read_text(encoding="utf-8", errors="replace")
                if _IMPORTED in log.splitlines():
                    self.ready.add(node)

    def remove(self, held: Sequence[str], folder: Path, is_late: bool) -> None:
        """Remove the container of those nodes that the job still has."""
        nodes = [node for node in held if node in self.ready]
        self.ready.clear()
        if nodes:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
            seconds = REMOVE_LATE_SECONDS if is_late else REMOVE_SECONDS
            self._container.remove(self._srun(nodes, folder), self._job_id, seconds)

    def _srun(self, nodes: Sequence[str], folder: Path) -> list[str]:
        return self._steps.srun(nodes, f"{folder}/%N.log", f"{folder}/%N.log")
