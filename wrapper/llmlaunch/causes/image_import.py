"""Why the image of a container was not imported: job.sbatch has each node import it, with a log of its own, before all
other steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.values import counted
from .cause import cause, cause_from_log
from .log_scan import read_log, scan

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.attempt_files import Cause


IMPORTED = "imported"  # the last line of a node's log, from inside the container
_IMAGE = re.compile(r"pyxis: failed to .{0,400}image: (\S{1,400})")  # bounded: the first words may be repeated
_SAID_BY_PYXIS = re.compile(r".*?pyxis: +")


def failed_imports(attempt_folder: Path) -> dict[str, Cause]:
    """Return the cause of each node without the image, by node: `container_busy` where it may have it next time. What a
    node cannot that others can is its own fault."""
    logs = {log.stem: read_log(log) for log in sorted((attempt_folder / file_names.IMPORT).glob("*.log"))}
    failures = {node: _cause_on(node, log) for node, log in logs.items() if IMPORTED not in log.splitlines()}
    if len(failures) < len(logs):
        for failure in failures.values():
            failure["sick"] = failure["kind"] == "image" and not failure["consequence"]
    return failures


def cause_of_import(attempt_folder: Path) -> Cause | None:
    """Return what a person should know of an import that failed: of the nodes, the first whose failure would recur;
    None where all that tried have the image."""
    failures = list(failed_imports(attempt_folder).values())
    if not failures:
        return None
    first = min(failures, key=lambda failure: (failure["consequence"], failure["kind"] == "container_busy"))
    others = f" (and on {counted(len(failures) - 1, 'other node')})" if len(failures) > 1 else ""
    at_fault = [node for failure in failures if failure["sick"] and (node := failure["node"])]
    return {**first, "line": first["line"] + others, "nodes": at_fault}


def _cause_on(node: str, log: str) -> Cause:
    image = _IMAGE.search(log)
    of_image = f"importing {image[1]}: " if image else ""
    log_cause = cause_from_log(scan(log), node, [])
    if log_cause is None:
        line = f"{of_image}it did not end in time (LLMLAUNCH_IMPORT_SECONDS gives it more)"
        return cause("image", node, line, "log", consequence=True)  # the node may have been lost
    kind = log_cause["kind"] if log_cause["kind"] == "container_busy" else "image"
    return cause(kind, node, of_image + _SAID_BY_PYXIS.sub("", log_cause["line"], count=1), "log")
