"""Nodes of a training as SLURM starts them, each by its own rendered train.sh, under strace: the real node side with
the scripted driver, 8 ranks a node, and stand-ins for torch, torchrun and Megatron-LM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.metadata_calls import TracedProcess
from support.node_rig import GIB, until
from support.probe_rig import SMALL_C, SMALL_CUDA

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "llama3-70b.yaml"
ATTEMPT, RANKS = "4711.0", 8
# Starts as many processes as torchrun would, with the same variables, and returns the first code that is not 0.
TORCHRUN = """
import os, subprocess, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:sys.argv.index("--")] if "=" in word)
program = sys.argv[sys.argv.index("--") + 1:]
each, node = int(options["nproc_per_node"]), int(options["node_rank"])
def environment(local):
    world = str(each * int(options["nnodes"]))
    return {**os.environ, "RANK": str(node * each + local), "LOCAL_RANK": str(local), "WORLD_SIZE": world}
ranks = [subprocess.Popen(program, env=environment(local)) for local in range(each)]
sys.exit(next((code for code in [rank.wait() for rank in ranks] if code), 0))
"""
# Imports some of the standard library, uses CUDA, says that it is up, and trains until it may end.
TRAINER = """
import asyncio, csv, ctypes, decimal, email, html, http.client, json, logging, multiprocessing, sqlite3, unittest, xml
import os, pathlib, time, torch
torch.cuda.init()
place = pathlib.Path(os.environ["MEETING_PLACE"])
(place / ("up." + os.environ["RANK"])).touch()
while not (place / "end").exists():
    time.sleep(0.2)
"""


class TracedNodes:
    """A rendered run directory, and the nodes started in it. `folder` is on this node's own disk."""

    def __init__(self, folder: Path, driver: Path, *overrides: str) -> None:
        self.folder, self.driver = folder, driver
        self.run = folder / "shared" / "run"
        self.place = folder / "place"
        for made in (folder / "shared", self.place, folder / "tmp"):
            made.mkdir(parents=True)
        self._write_stand_ins()
        words = [f"backend.path={folder / 'megatron'}", *overrides, "-o", str(self.run)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "wrapper")}
        command = [sys.executable, "-m", "llmlaunch", "render", str(RECIPE), *words]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        for made in ("done", "flight", "memory", "ranks"):  # as job.sbatch makes them
            (self.run / "attempts" / ATTEMPT / made).mkdir(parents=True)
        (folder / "scenario").write_text("gpu\n" * RANKS)
        self.nodes: list[TracedProcess] = []

    def _write_stand_ins(self) -> None:
        package = self.folder / "site" / "torch"
        files = {
            package / "__init__.py": "from torch import _C, cuda\n",
            package / "_C.py": SMALL_C,
            package / "cuda" / "__init__.py": SMALL_CUDA,
            package / "distributed" / "__init__.py": "",
            package / "distributed" / "run.py": TORCHRUN,
            self.folder / "megatron" / "pretrain_gpt.py": TRAINER,
        }
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def environment(self, node: int) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": f"node{node:04d}",
            "LLMLAUNCH_RUN_DIR": str(self.run),
            "LLMLAUNCH_ATTEMPT": ATTEMPT,
            "LLMLAUNCH_NODES": "2",
            "LLMLAUNCH_PYTHON": sys.executable,
            "LLMLAUNCH_SPOOL": str(self.folder / "spool"),
            "MASTER_ADDR": "node0000",
            "MASTER_PORT": "29500",
            "PYTHONPATH": str(self.folder / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "MEETING_PLACE": str(self.place),
            "LD_LIBRARY_PATH": str(self.driver),
            "FAKE_NVML_SCENARIO": str(self.folder / "scenario"),
            "FAKE_NVML_CALLS": str(self.folder / "calls"),
        }

    def start(self, nodes: int) -> None:
        """Start that many nodes, and wait until every trainer uses its device."""
        for node in range(nodes):
            trace, log = self.folder / f"trace{node}", self.run / "logs" / f"{ATTEMPT}.node{node:04d}.log"
            command = ("bash", str(self.run / "train.sh"))
            self.nodes.append(TracedProcess(command, self.run, trace, self.environment(node), log))
        until(lambda: len(list(self.place.glob("up.*"))) == nodes * RANKS, "every trainer is up")
        attempt = self.run / "attempts" / ATTEMPT
        accounts = lambda: [path.read_text().count('"devices"') for path in attempt.glob("memory/*")]  # noqa: E731
        until(lambda: sum(accounts()) >= nodes * RANKS, "every probe has written")
        until(lambda: len(list((self.run / "peaks").glob("*"))) == nodes, "the monitors have written")

    def end(self) -> list[int]:
        """Let the trainers end; return the exit code of each node's train.sh."""
        (self.place / "end").touch()
        return [node.process.wait() for node in self.nodes]


__all__ = ["ATTEMPT", "GIB", "RANKS", "TracedNodes"]
