"""What Megatron-LM's rerun state machine says of a GPU. Its lines are those of Megatron core 0.19.2, run on a CPU by
tests/frameworks/rerun_machine.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.cause import cause_from_log
from llmlaunch.causes.log_scan import scan
from llmlaunch.causes.rerun_verdict import is_judged_step, with_first_gpu
from llmlaunch.causes.suspects import nodes_to_leave_out, signs_against
from llmlaunch.rundir.attempt import Attempt

SPEAKER = "ERROR:megatron.core.rerun_state_machine:"
PLACE = f"{SPEAKER}Rank 5, node n2, device 1, iteration #3: "
UNEXPECTED = (
    f"{SPEAKER}Unexpected result inf on rank 5 at iteration #3 invocation #1 "
    "(message='found Inf in local forward loss calculation')\n"
)
TRANSIENT = (
    f"{UNEXPECTED}{PLACE}First rerun: unexpected result is not reproducible within the tolerance (1.5 != inf)!\n"
    f"{PLACE}Possible transient error!!\n"
)
AGAIN = (
    f"{UNEXPECTED}{PLACE}First rerun: unexpected result is reproducible within the tolerance (inf = inf). "
    "Need to rerun on a different GPU to verify correctness.!\n"
)
SAME_GPU = (
    f"{SPEAKER}Got rescheduled on the same GPU. Need to resume again from the same checkpoint (node: n2, gpu: 1)\n"
)
PERSISTENT = f"{PLACE}Possible persistent error!!\n"
APPLICATION = f"{PLACE}Correct result (but possible Application error) (found Inf in local forward loss calculation)!\n"


def cause_of(log: str, code: int) -> dict[str, Any]:
    ranks = [{"rank": rank, "local_rank": rank % 4, "node": "n2", "exit_code": code, "signal": None} for rank in (4, 5)]
    cause = cause_from_log(scan(log), "n2", ranks)
    assert cause is not None
    return cause


@pytest.mark.parametrize(
    ("log", "code", "kind", "signs"),
    [
        pytest.param(TRANSIENT, 17, "silent_corruption", {"n2": 1}, id="another result on the same GPU"),
        pytest.param(AGAIN, 16, "rerun", {}, id="the same result, to be looked at elsewhere"),
        pytest.param(SAME_GPU, 16, "rerun", {}, id="it got the same GPU"),
        pytest.param(APPLICATION, 17, "unexpected_result", {}, id="a second GPU agrees"),
    ],
)
def test_verdicts(log: str, code: int, kind: str, signs: dict[str, int]) -> None:
    cause = cause_of(log, code)
    assert (cause["kind"], signs_against(cause)) == (kind, signs)
    if kind != "unexpected_result":
        assert cause["numbers"] == {"device": 1}


def test_a_check_that_only_warns_ended_nothing() -> None:
    log = (
        TRANSIENT.replace(UNEXPECTED, "").replace("ERROR:", "WARNING:")
        + "Traceback (most recent call last):\n  File x\nValueError: bad sample\n"
    )
    assert cause_of(log, 1)["kind"] == "crash"


def test_a_persistent_error_is_the_first_gpus_though_its_line_names_the_second(tmp_path: Path) -> None:
    for number, status in enumerate(({"cause": {**cause_of(AGAIN, 16), "node": "n7", "rank": 5}}, {})):
        folder = tmp_path / "attempts" / f"7.{number}"
        folder.mkdir(parents=True)
        (folder / "attempt.json").write_text(json.dumps({"started_at": 1.0 + number}))
        (folder / "status.json").write_text(json.dumps({"attempt": folder.name, "state": "failed", **status}))
    written = cause_of(PERSISTENT, 17)
    assert signs_against(written) == {}  # of itself it accuses nobody
    cause = with_first_gpu(written, Attempt(tmp_path, "7.1"))
    assert (cause["node"], cause["sick"], signs_against(cause)) == ("n7", True, {"n7": 2})
    assert cause["line"].startswith("device 1 of n7 gave another result than a second GPU: ")
    assert is_judged_step(cause)
    alone = with_first_gpu(written, Attempt(tmp_path, "7.0"))  # nobody knows where it ran before
    assert (alone["node"], signs_against(alone), is_judged_step(alone)) == (None, {}, False)


def test_the_node_is_left_out_where_its_result_is_to_be_computed_again() -> None:
    assert nodes_to_leave_out([cause_of(AGAIN, 16)]) == ["n2"]
