"""Nodes of a training as SLURM starts them, each by its own `node.pyz node`, under strace: the real node side with the
scripted driver, 8 ranks a node, and stand-ins for torch and Megatron-LM."""

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
# Imports some of the standard library, uses CUDA, says that it is up, and trains until it may end.
TRAINER = """
import csv, ctypes, json, logging
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
        for made in ("done", "flight", "memory", "ranks"):  # as the job makes them
            (self.run / "attempts" / ATTEMPT / made).mkdir(parents=True)
        (folder / "scenario").write_text("gpu\n" * RANKS)
        self.nodes: list[TracedProcess] = []

    def _write_stand_ins(self) -> None:
        package = self.folder / "site" / "torch"
        files = {
            package / "__init__.py": "from torch import _C, cuda\n",
            package / "_C.py": SMALL_C,
            package / "cuda" / "__init__.py": SMALL_CUDA,
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
            "LLMLAUNCH_PYTHON": sys.executable,
            "PYTHONPATH": str(self.folder / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "MEETING_PLACE": str(self.place),
            "LD_LIBRARY_PATH": str(self.driver),
            "FAKE_NVML_SCENARIO": str(self.folder / "scenario"),
            "FAKE_NVML_CALLS": str(self.folder / "calls"),
        }

    def command(self) -> list[str]:
        """As the job starts it."""
        place = ("--run-dir", str(self.run), "--attempt", ATTEMPT, "--nodes", "2", "--address", "node0000")
        return [sys.executable, "-I", "-S", str(self.run / "node.pyz"), "node", *place]

    def start(self, nodes: int) -> None:
        """Start that many nodes, and wait until every trainer uses its device."""
        for node in range(nodes):
            trace, log = self.folder / f"trace{node}", self.run / "logs" / f"{ATTEMPT}.node{node:04d}.log"
            environment = self.environment(node)
            self.nodes.append(TracedProcess(self.command(), self.run, trace, environment, log, "port 29500\n"))
        until(lambda: len(list(self.place.glob("up.*"))) == nodes * RANKS, "every trainer is up")
        attempt = self.run / "attempts" / ATTEMPT
        accounts = lambda: [path.read_text().count('"devices"') for path in attempt.glob("memory/*")]  # noqa: E731
        until(lambda: sum(accounts()) >= nodes * RANKS, "every probe has written")
        until(lambda: len(list((self.run / "peaks").glob("*"))) == nodes, "the monitors have written")

    def end(self) -> list[int]:
        """Let the trainers end; return each node's exit code."""
        (self.place / "end").touch()
        return [node.process.wait() for node in self.nodes]


__all__ = ["ATTEMPT", "GIB", "RANKS", "TracedNodes"]
