"""Why a container's image was not imported, from the logs that the nodes left."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.causes.attempt_cause import cause_of
from llmlaunch.causes.cause import nodes_at_fault, sentence
from llmlaunch.causes.image_import import cause_of_import, failed_imports
from llmlaunch.causes.suspects import signs_against
from llmlaunch.rundir.attempt import Attempt

# As pyxis 0.24.0 prints what enroot 4.1.2 says.
FAILED = """\
slurmstepd-{node}: error: pyxis: failed to import docker image: nvcr.io#a/b:1
slurmstepd-{node}: error: pyxis: printing enroot log file:
slurmstepd-{node}: error: pyxis:     [INFO] Querying registry for permission grant
slurmstepd-{node}: error: pyxis:     {error}
"""
NO_SPACE = "Write on output file failed because No space left on device"
ABSENT = "[ERROR] URL https://nvcr.io/v2/a/b/manifests/1 returned error code: 404 Not Found"
BUSY = "[ERROR] URL https://nvcr.io/v2/a/b/manifests/1 returned error code: 429 "
DONE = "pyxis: imported docker image: nvcr.io#a/b:1\nimported\n"


def attempt(folder: Path, **logs: str) -> Attempt:
    """One whose nodes left these logs of the import; an error of enroot's alone stands for the log around it."""
    of_import = folder / "attempts" / "7.0" / "import"
    of_import.mkdir(parents=True)
    for node, log in logs.items():
        whole = log if "\n" in log or not log else FAILED.format(node=node, error=log)
        (of_import / f"{node}.log").write_text(whole)
    return Attempt(folder, "7.0")


@pytest.mark.parametrize(
    ("logs", "kind", "line"),
    [
        ({"n1": ABSENT}, "image", f"importing nvcr.io#a/b:1: {ABSENT}"),
        ({"n1": BUSY, "n2": BUSY}, "container_busy", f"importing nvcr.io#a/b:1: {BUSY.strip()} (and on 1 other node)"),
        ({"n1": BUSY, "n2": ABSENT}, "image", f"importing nvcr.io#a/b:1: {ABSENT} (and on 1 other node)"),
        ({"n1": "", "n2": ABSENT, "n3": ""}, "image", f"importing nvcr.io#a/b:1: {ABSENT} (and on 2 other nodes)"),
        ({"n1": ""}, "image", "it did not end in time (LLMLAUNCH_IMPORT_SECONDS gives it more)"),
    ],
)
def test_a_failure_that_would_recur_is_told_before_one_that_may_not(
    tmp_path: Path, logs: dict[str, str], kind: str, line: str
) -> None:
    cause = cause_of(attempt(tmp_path, **logs), [], 1)
    assert cause is not None
    assert (cause["kind"], cause["line"], cause["sick"]) == (kind, line, False)


@pytest.mark.parametrize(
    ("logs", "at_fault"),
    [
        ({"n1": NO_SPACE, "n2": DONE, "n3": NO_SPACE}, ["n1", "n3"]),
        ({"n1": NO_SPACE, "n2": BUSY, "n3": DONE, "n4": ""}, ["n1"]),
        ({"n1": BUSY, "n2": DONE}, []),
        ({"n1": ABSENT, "n2": ABSENT}, []),
    ],
)
def test_a_node_that_cannot_what_others_can_is_suspected(
    tmp_path: Path, logs: dict[str, str], at_fault: list[str]
) -> None:
    cause = cause_of(attempt(tmp_path, **logs), [], 1)
    assert nodes_at_fault(cause) == at_fault
    assert signs_against(cause) == dict.fromkeys(at_fault, 1)


def test_an_import_that_all_nodes_ended_well_is_no_cause(tmp_path: Path) -> None:
    assert cause_of_import(attempt(tmp_path, n1=DONE, n2=f"[WARN] of enroot's\n{DONE}").folder) is None


def test_a_person_hears_what_where_and_why(tmp_path: Path) -> None:
    cause = failed_imports(attempt(tmp_path, n1=DONE, n2=ABSENT).folder)["n2"]
    assert sentence(cause) == f"the image could not be imported (n2): importing nvcr.io#a/b:1: {ABSENT}"


def test_a_node_that_was_lost_meanwhile_is_the_better_cause(tmp_path: Path) -> None:
    lost = attempt(tmp_path, n1=DONE, n2="")
    assert (cause_of(lost, [], 1, "NODE_FAIL") or {})["kind"] == "node_fail"
