"""What a node tells its ranks of their place, held against what torchrun tells them (torch of .venv), as recorded; in
`make soak` torchrun is asked."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launched_node import ENVIRONMENTS, PORT, LaunchedNode
from support.node_rig import ATTEMPT, NodeRig, archive, cpu_node  # noqa: F401
from support.recorded import Recorded, recorded, versions
from support.soak import RECORDING, share

pytestmark = pytest.mark.frameworks

ADDRESS = "127.0.0.1"
# Its agent serves the store, and reads what its ranks write down of their exceptions.
OF_TORCHRUN_ALONE = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
# Rank 0 makes the store itself, as with any other launcher; and the id of a run is its attempt.
DIFFERENT = {"TORCHELASTIC_USE_AGENT_STORE": ("False", "True"), "TORCHELASTIC_RUN_ID": (ATTEMPT, "none")}
SHELLS = ("_", "PWD", "OLDPWD", "SHLVL")
OF_THE_NODE_ALONE = {"SLURM_NODEID", "SLURMD_NODENAME"}  # and LLMLAUNCH_...


def by_torchrun(folder: Path, environment: dict[str, str]) -> dict[str, dict[str, str]]:
    """The variables of each rank on two nodes of two, but for those it was given."""
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
    nodes = []
    for node in (0, 1):
        place = [f"--node_rank={node}", "--rdzv_backend=static", f"--master_addr={ADDRESS}", f"--master_port={port}"]
        words = ["--nnodes=2", "--nproc_per_node=2", *place, "--no_python", "--", *ENVIRONMENTS]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        nodes.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    for process in nodes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    found = variables_in(folder).items()
    return {
        str(rank): {
            name: value for name, value in sorted(variables.items() - environment.items()) if name not in SHELLS
        }
        for rank, variables in found
    }


def variables_in(folder: Path) -> dict[int, dict[str, str]]:
    """What ENVIRONMENTS have written down, by rank."""
    found = {}
    for path in folder.glob("env.*"):
        pairs = (entry.partition("=") for entry in path.read_text().split("\0") if entry)
        found[int(path.suffix[1:])] = {name: value for name, _, value in pairs}
    return found


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Recorded]:
    with recorded("torchrun", versions(("torch",), list(map(Path, sys.path))), live=()) as record:
        yield record


THREADS, HANDLING = {"OMP_NUM_THREADS": "3"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}


@pytest.mark.parametrize(
    "own",
    share((HANDLING, THREADS), lambda own: RECORDING or own == HANDLING),
    ids=lambda own: next(iter(own)),
)
def test_a_rank_finds_the_variables_that_torchrun_sets(
    cpu_node: NodeRig,  # noqa: F811
    tmp_path: Path,
    own: dict[str, str],
    torchrun: Recorded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*THREADS, *HANDLING):
        monkeypatch.delenv(name, raising=False)
    environment = cpu_node.environment(PYTHONUNBUFFERED="1", **own)
    told = torchrun.answer(json.dumps(own), lambda: by_torchrun(tmp_path, environment), exact=False)
    theirs = {int(rank): {**environment, **variables} for rank, variables in told.items()}
    node = LaunchedNode(cpu_node, *ENVIRONMENTS)
    end = node.train("--nodes", "2", "--address", ADDRESS, SLURM_NODEID="1", **own)
    assert end.code == 0, end.log
    ours = variables_in(node.run)
    assert (sorted(ours), sorted(theirs)) == ([2, 3], [0, 1, 2, 3])
    for rank, variables in ours.items():
        different = {**DIFFERENT, "MASTER_PORT": (PORT, theirs[rank]["MASTER_PORT"])}
        shared = {name for name in {*variables, *theirs[rank]} if name not in SHELLS}
        differing = {name for name in shared if variables.get(name) != theirs[rank].get(name)}
        named = {name for name in differing if not name.startswith("LLMLAUNCH_")}
        assert named == OF_TORCHRUN_ALONE | {*different} | OF_THE_NODE_ALONE
        assert {name: (variables[name], theirs[rank][name]) for name in different} == different
        assert not OF_TORCHRUN_ALONE & variables.keys()
