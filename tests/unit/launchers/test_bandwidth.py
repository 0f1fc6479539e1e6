"""Which nodes are measured, and what is told of a measurement that cannot be."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.bandwidth import BandwidthProbe, allocated_nodes, measure_allocation, measure_locally

SCONTROL = """\
#!/bin/sh
case $3 in
  'n[1-3]') printf 'n1\\nn2\\nn3\\n' ;;
  'n[2-3]') printf 'n2\\nn3\\n' ;;
  n9) echo n9 ;;
  n1) echo n1 ;;
  *) echo 'Invalid hostlist' >&2; exit 1 ;;
esac
"""
INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool(tmp_path, "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def test_all_nodes_of_the_allocation_or_those_named() -> None:
    assert allocated_nodes(INSIDE) == ["n1", "n2", "n3"]
    assert allocated_nodes(INSIDE, "n[2-3]") == ["n2", "n3"]


@pytest.mark.parametrize(
    ("environment", "wanted", "message"),
    [
        ({}, None, "not inside a SLURM allocation"),
        (INSIDE, "n9", "n9 is not in this allocation, which is n1 n2 n3"),
        (INSIDE, "n1", "this is 1 node; bandwidth between nodes takes two or more"),
        (INSIDE, "n[", "scontrol names no nodes: Invalid hostlist"),
    ],
)
def test_nodes_that_cannot_be_measured_are_named(environment: dict[str, str], wanted: str | None, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        allocated_nodes(environment, wanted)


def test_what_srun_is_asked_for_and_an_answer_for_other_nodes_is_refused(tools: Path) -> None:
    answer = '{"nodes": ["n1", "n9"], "bytes_per_second": [[0, 1e9], [1e9, 0]]}'
    tool(tools, "srun", f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{tools}/arguments\necho '{answer}'\n")
    with pytest.raises(UserError, match="answers for n1 n9, but was asked for n1 n2"):
        measure_allocation(["n1", "n2"], BandwidthProbe("python", devices=4), lambda line: None)
    arguments = {"--nodes=2", "--ntasks-per-node=1", "--nodelist=n1,n2", "--nproc_per_node=4", "--master_addr=n1"}
    assert arguments <= set((tools / "arguments").read_text().splitlines())


def test_one_process_is_no_network_and_srun_that_fails_is_told_with_its_last_words(tools: Path) -> None:
    tool(tools, "srun", "#!/bin/sh\necho 'srun: error: n2: task 1: Exited with exit code 1' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"failed with exit code 1; its last words:\n  srun: error: n2: task 1"):
        measure_allocation(["n1", "n2"], BandwidthProbe("python"), lambda line: None)
    with pytest.raises(UserError, match="at least 2 processes"):
        measure_locally(1, BandwidthProbe("python"), lambda line: None)
