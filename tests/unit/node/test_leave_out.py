"""Nodes at fault are left out of what starts next, within a bound; the commands of SLURM answer from files here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.node.held_nodes import exclusion, leave_out

PARTITION = [f"n{number}" for number in range(40)]


@pytest.mark.parametrize(
    ("at_fault", "before", "own", "left_out"),
    [
        (["n1"], [], [], ["n1"]),
        (["n1"], ["n2"], [], ["n1", "n2"]),
        (["n1"], ["n2", "n3"], [], ["n1", "n2"]),  # two of forty: the oldest is used again
        (["n1"], ["n7", "n8", "n9", "n2"], ["n7", "n8", "n9"], ["n7", "n8", "n9", "n1", "n2"]),  # a person's own stay
        (["n1"], ["n1"], [], ["n1"]),
    ],
)
def test_the_latest_nodes_at_fault_are_left_out_and_all_that_a_person_named(
    at_fault: list[str], before: list[str], own: list[str], left_out: list[str]
) -> None:
    assert exclusion(at_fault, before, own, PARTITION) == left_out


SCONTROL = """#!/bin/bash
case $* in
*"show job"*) echo "JobId=${!#} JobName=x ReqNodeList=(null) ExcNodeList=BEFORE NodeList=(null)" ;;
*) echo "$*" >>"$0.log"; [[ $2 != JobId=13 ]] || { echo "Access/permission denied" >&2; exit 1; } ;;
esac
"""


class Site:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
        monkeypatch.setenv("SLURM_JOB_PARTITION", "train")
        (directory / "submission.json").write_text(json.dumps({"job_id": "11", "chain": ["11", "12", "13", "--all"]}))
        self.script = directory / "job.sbatch"
        self.script.write_text("#!/bin/bash\n#SBATCH --nodes=2\n")

    def write(self, command: str, text: str) -> None:
        path = self.directory / command
        path.write_text(text)
        path.chmod(0o755)

    def leave_out(
        self, node: str, chain: bool = False, before: str = "(null)", down: tuple[str, ...] = ()
    ) -> list[str]:
        """Leave out a node in a partition of four; return what scontrol was told to update."""
        self.write("scontrol", SCONTROL.replace("BEFORE", before))
        states = (f"n{number} {'down*' if f'n{number}' in down else 'alloc'}" for number in range(1, 5))
        self.write("sinfo", "#!/bin/bash\necho '" + "\n".join(states) + "'\n")
        leave_out(self.directory, "11", [node], chain)
        log = self.directory / "scontrol.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_the_job_itself_is_told_when_it_goes_back_to_the_queue(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.leave_out("n3") == ["update JobId=11 ExcNodeList=n3"]
    assert "n3 at fault: left out when the job starts again" in capfd.readouterr().err


def test_the_jobs_that_follow_in_a_chain_are_told_each(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    updates = site.leave_out("n3", chain=True)
    assert updates == ["update JobId=12 ExcNodeList=n3", "update JobId=13 ExcNodeList=n3"]
    said = capfd.readouterr().err
    assert "n3 at fault: left out when job 12 starts" in said
    assert "scontrol update: Access/permission denied" in said
    assert "when job 13 starts" not in said


def test_a_persons_own_exclusion_stays_beside_the_bound(site: Site) -> None:
    site.script.write_text("#!/bin/bash\n#SBATCH --exclude='n1'\n")
    assert site.leave_out("n3", before="n[1-2]") == ["update JobId=11 ExcNodeList=n1,n3"]


def test_a_job_that_could_not_start_without_it_keeps_the_node(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.leave_out("n3", down=("n1", "n2")) == []
    assert "n3 at fault, but too few other nodes are left" in capfd.readouterr().err
