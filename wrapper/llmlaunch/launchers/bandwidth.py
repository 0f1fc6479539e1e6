"""The bandwidth between the nodes of the allocation this process runs in, measured by torch under srun and torchrun;
or between processes of this machine, to try it.

The script travels in an environment variable and the answer on stdout: nodes and this host need share no folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.launchers.run_environment import INTERPRETER_VARIABLE
from llmlaunch.rundir.values import counted
from llmlaunch.trainers import NETWORK_BANDWIDTH

# $0 is the interpreter, the rest torchrun's and the script's words. Python reads the script from a file of the node.
_ON_EACH_NODE = """\
file=$(mktemp) && printf %s "$LLMLAUNCH_NETWORK_SCRIPT" >"$file" || exit 1
"$0" -m torch.distributed.run --node_rank="${SLURM_NODEID:-0}" "${@:1:LLMLAUNCH_TORCHRUN_WORDS}" \\
  "$file" "${@:LLMLAUNCH_TORCHRUN_WORDS + 1}"
code=$?
rm -f -- "$file"
exit "$code"
"""


@dataclass(frozen=True)
class BandwidthProbe:
    """How it is measured. `devices` are processes a node."""

    python: str
    devices: int = 1
    message_bytes: int = 64 * 2**20
    repeats: int = 5

    @property
    def words(self) -> list[str]:
        return [f"--message-bytes={self.message_bytes}", f"--repeats={self.repeats}"]


@dataclass(frozen=True)
class MeasuredBandwidth:
    """`bytes_per_second[i][j]` from node i to node j, for each device; `how` is for the file."""

    nodes: tuple[str, ...]
    bytes_per_second: tuple[tuple[float, ...], ...]
    how: Mapping[str, Any]


def allocated_nodes(environment: Mapping[str, str], wanted: str | None = None) -> list[str]:
    """The nodes of this allocation, or those of them that the SLURM host list `wanted` names.

    Raises:
        UserError: not inside an allocation, fewer than two nodes, or nodes that are not in it.
    """
    if not environment.get("SLURM_JOB_ID"):
        raise UserError("not inside a SLURM allocation")
    allocated = _hostnames(environment.get("SLURM_JOB_NODELIST", ""))
    nodes = allocated if wanted is None else _hostnames(wanted)
    strangers = [node for node in nodes if node not in allocated]
    if strangers:
        raise UserError(f"--nodes: {strangers[0]} is not in this allocation, which is {' '.join(allocated)}")
    if len(nodes) < 2:
        raise UserError(f"this is {len(nodes)} node; bandwidth between nodes takes two or more: allocate --nodes=2")
    return nodes


def measure_allocation(nodes: Sequence[str], probe: BandwidthProbe, say: Callable[[str], None]) -> MeasuredBandwidth:
    """Between all of `nodes`, by one torchrun on each. Raises `UserError` with the last words of what failed."""
    job = int(os.environ["SLURM_JOB_ID"].split("_")[0])
    srun = ["srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--overlap"]
    srun += [f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=1", "--export=ALL"]
    if os.environ.get("SLURM_CPUS_PER_TASK"):
        srun.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    # not the port a training of this job would take (20000 + job id)
    port = 20000 + (job + 5000) % 10000
    rendezvous = [f"--master_addr={nodes[0]}", f"--master_port={port}", "--rdzv_backend=static"]
    torchrun = [f"--nnodes={len(nodes)}", f"--nproc_per_node={probe.devices}", *rendezvous]
    links = len(nodes) * (len(nodes) - 1)
    say(f"Measuring between {counted(len(nodes), 'node')}, {counted(probe.devices, 'device')} each: {links} links...")
    answer = _run(srun, probe, torchrun, probe.words)
    measured = _measured(answer, probe)
    if sorted(measured.nodes) != sorted(nodes):
        raise UserError(f"the measurement answers for {' '.join(measured.nodes)}, but was asked for {' '.join(nodes)}")
    return measured


def measure_locally(processes: int, probe: BandwidthProbe, say: Callable[[str], None]) -> MeasuredBandwidth:
    """Between processes of this machine, each for a node: says nothing of a network, but takes the same way."""
    if processes < 2:
        raise UserError("--local: give at least 2 processes")
    torchrun = ["--nnodes=1", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1"]
    torchrun += [f"--master_port={free_port()}", "--rdzv_backend=static"]
    say(f"Measuring between {counted(processes, 'process')} of this machine...")
    return _measured(_run([], probe, torchrun, [*probe.words, "--each-process-a-node"]), probe)


def _run(
    before: Sequence[str], probe: BandwidthProbe, torchrun: Sequence[str], words: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    if before and shutil.which(before[0]) is None:
        raise UserError(f"{before[0]}: not found on this host; run it where SLURM's commands are")
    variables = {
        "LLMLAUNCH_NETWORK_SCRIPT": NETWORK_BANDWIDTH.read_text(encoding="utf-8"),
        "LLMLAUNCH_TORCHRUN_WORDS": str(len(torchrun)),
        "OMP_NUM_THREADS": "1",
    }
    return run_probe([*before, "bash", "-c", _ON_EACH_NODE, probe.python, *torchrun, *words], variables)


def run_probe(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command with these variables beside the person's own. Raises UserError where it cannot be started."""
    try:
        return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    except OSError as failure:
        raise UserError(f"{command[0]}: cannot be run: {failure.strerror}") from None


def _measured(answer: subprocess.CompletedProcess[str], probe: BandwidthProbe) -> MeasuredBandwidth:
    report = reported(answer, "bytes_per_second")
    if report is not None:
        nodes, speeds = report.pop("nodes"), report.pop("bytes_per_second")
        return MeasuredBandwidth(tuple(nodes), tuple(map(tuple, speeds)), report)
    if any(text in answer.stderr + answer.stdout for text in ("No module named 'torch'", "No module named torch")):
        raise UserError(f"{probe.python}: has no torch on the nodes; name the training environment's (--python)")
    raise UserError(f"the measurement failed with exit code {answer.returncode}; its last words:\n{last_lines(answer)}")


def reported(answer: subprocess.CompletedProcess[str], key: str) -> dict[str, Any] | None:
    """Return the JSON object with `key` that a probe that ended well printed, maybe among other lines."""
    for line in answer.stdout.splitlines() if answer.returncode == 0 else ():
        with contextlib.suppress(ValueError):
            report = json.loads(line)
            if isinstance(report, dict) and key in report:
                return report
    return None


def last_lines(answer: subprocess.CompletedProcess[str]) -> str:
    output = [line for line in (answer.stderr + answer.stdout).splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in output[-8:])


def _hostnames(expression: str) -> list[str]:
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", expression], capture_output=True, text=True, check=False
        )
    except OSError as failure:
        raise UserError(f"scontrol cannot be run: {failure.strerror}; run it where SLURM's commands are") from None
    if answer.returncode != 0 or not answer.stdout.split():
        raise UserError(f"{expression or 'SLURM_JOB_NODELIST'}: scontrol names no nodes: {answer.stderr.strip()}")
    return answer.stdout.split()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def default_python() -> str:
    """The interpreter that trains: LLMLAUNCH_PYTHON, else this one."""
    return os.environ.get(INTERPRETER_VARIABLE) or sys.executable
