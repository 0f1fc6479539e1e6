"""What a refusal of sbatch and a reason for waiting tell a person to do."""

from __future__ import annotations

import pytest

from llmlaunch.report.slurm_words import mend_of_refusal, pending_advice

FAILED = "Batch job submission failed: "
POLICY = f"{FAILED}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
# As sbatch of 22.05.8 says them (complaint of launchers/slurm/text.py joins its lines).
REFUSALS = {
    f"AssocMaxSubmitJobLimit; {POLICY}": ("cancel one", ""),
    f"QOSMaxSubmitJobPerUserLimit; {POLICY}": ("cancel one", ""),
    f"QOSMaxWallDurationPerJobLimit; {POLICY}": ("slurm: {time: ...}", "--time=HH:MM:SS"),
    f"QOSMaxNodePerJobLimit; {POLICY}": ("fewer nodes", ""),
    POLICY: ("sacctmgr show qos", ""),
    f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)": ("sinfo -o", "--time=HH:MM:SS"),
    f"say which project; {FAILED}Invalid account or account/partition combination specified": (
        *("slurm: {account: NAME}", "--account=NAME"),
    ),
    f"{FAILED}User's group not permitted to use this partition": ("sinfo -s", "--partition=NAME"),
    f"invalid partition specified: nope; {FAILED}Invalid partition name specified": ("sinfo -s", "--partition=NAME"),
    f"{FAILED}More processors requested than permitted": ("slurm: {partition: NAME}", ""),
    f"{FAILED}Requested node configuration is not available": ("cluster profile", ""),
    f"{FAILED}Invalid generic resource (gres) specification": ("gpu_request", ""),
    f"{FAILED}Invalid feature specification": ("slurm: {constraint: NAME}", ""),
    f"{FAILED}Requested reservation is invalid": ("slurm: {reservation: NAME}", ""),
    f"{FAILED}Invalid node name specified": ("nodelist", ""),
    "unrecognized option '--no-such-option'": ("", ""),
}


@pytest.mark.parametrize(("words", "expected"), REFUSALS.items(), ids=[words[-40:] for words in REFUSALS])
def test_a_refusal_names_the_key_that_mends_it(words: str, expected: tuple[str, str]) -> None:
    mend = mend_of_refusal(words, ["--nodes=2"])
    assert expected[0] in mend.sentence
    assert mend.option == expected[1]


def test_a_rule_of_the_site_alone_is_answered_with_what_such_rules_are_often_about() -> None:
    words = f"no whole nodes here; {FAILED}Unspecified error"
    assert mend_of_refusal(words, ["--exclusive", "--account=a", "--time=1:00:00"]).sentence == (
        "A rule of the site (its job_submit plugin) refused it, and what that says stands first; this script asks for "
        "whole nodes (slurm: {exclusive: false} does not), names no partition (slurm: {partition: NAME})"
    )
    everything = ["--account=a", "--time=1:00:00", "--partition=train"]
    assert mend_of_refusal(words, everything).sentence.endswith("what that says stands first")


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("PartitionTimeLimit", "never starts: cancel it"),
        ("AssocMaxWallDurationPerJobLimit", "never starts: cancel it"),
        ("QOSMaxNodePerUserLimit", "your other jobs have all"),
        ("QOSGrpNodeLimit", "others of its account or QoS have all"),
        ("AssocGrpCPUMinutesLimit", "the budget of its account or QoS is used up"),
        ("AccountNotAllowed", "slurm.account"),
        ("QOSNotAllowed", "slurm.qos"),
        ("DependencyNeverSatisfied", "never starts"),
        ("JobHeldUser", "scontrol release"),
        ("launch failed requeued held", "scontrol release"),
        ("JobHeldAdmin", "only the site"),
        ("ReqNodeNotAvail, UnavailableNodes:n[3-4]", "down, drained or kept"),
    ],
)
def test_a_reason_that_may_never_clear_says_what_to_do(reason: str, advice: str) -> None:
    assert advice in pending_advice(reason)


@pytest.mark.parametrize("reason", ["", "None", "Priority", "Dependency", "JobArrayTaskLimit"])
def test_waiting_alone_needs_no_advice(reason: str) -> None:
    assert pending_advice(reason) == ""
