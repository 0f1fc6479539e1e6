"""One node of a training as the batch script starts it: `node.pyz node`, with a rendered `launch` and any program in
the place of the trainer."""

from __future__ import annotations

import json
import shlex
from functools import cache
from typing import Any, NamedTuple

from llmlaunch.frameworks.base import Rendered
from llmlaunch.rendering.launch import launch_json
from support.node_rig import ATTEMPT, NODE, PATIENCE_SECONDS, NodeRig
from support.recipes import recipe_of

PORT = "29500"
# Has torch, and becomes whatever it is to run.
PYTHON = '#!/bin/sh\ncase "$1" in -c) {probed}; echo "torch {torch}";; *) exec "$@";; esac\n'


@cache
def rendered_launch() -> str:
    """`launch` of the quickstart's run.json: two ranks on a CPU."""
    return json.dumps(launch_json(recipe_of("quickstart"), Rendered((), {}, {}), None))


class Ended(NamedTuple):
    """How a node ended: its exit code, its log, and the lines that it sent to the job."""

    code: int
    log: str
    sent: list[str]


class LaunchedNode:
    """Its run directory is that of `rig`. `launch` changes what is rendered of it."""

    def __init__(self, rig: NodeRig, *program: str, devices: int = 2, **launch: Any) -> None:
        self.rig, self.run = rig, rig.run_directory
        self.python = rig.run_directory.parent / "python"
        self.write_python()
        value = {**json.loads(rendered_launch()), "node_files": ["node.pyz"], "hook_files": [], **launch}
        rig.write("run.json", {"devices_per_node": devices, "launch": value})
        rig.write("command.txt", "# what is trained\n" + "\n".join(map(shlex.quote, program)) + "\n")
        (self.run / "node.pyz").symlink_to(rig.archive)
        for name in ("logs", "peaks", f"attempts/{ATTEMPT}/done", f"attempts/{ATTEMPT}/ranks"):
            (self.run / name).mkdir(parents=True)

    def write_python(self, torch: str = "2.13.0", probed: str = ":") -> None:
        """`probed`: what the interpreter does when it is asked for its torch."""
        self.python.write_text(PYTHON.format(torch=torch, probed=probed))
        self.python.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        """What the job sets for a node."""
        return {"LLMLAUNCH_PYTHON": str(self.python), "SLURMD_NODENAME": NODE, **more}

    def start(self, *words: str, **more: Any) -> Any:
        """Start it as the job does, with `words` for `node.pyz node`, and answer with the port."""
        place = ("--run-dir", str(self.run), "--attempt", ATTEMPT, "--address", NODE)
        process = self.rig.start("node", *place, *words, **self.environment(**more))
        process.stdin.write(f"port {PORT}\n")
        process.stdin.flush()
        return process

    def ended(self, process: Any) -> Ended:
        """Wait for its end, as a job that is still there."""
        log = process.stderr.read()
        return Ended(process.wait(PATIENCE_SECONDS), log, process.stdout.read().splitlines())

    def train(self, *words: str, **more: Any) -> Ended:
        return self.ended(self.start(*words, **more))

    def until_listening(self, process: Any, ranks: int = 2) -> None:
        """Wait until so many listeners (node_rig.LISTENER) have said that they are ready."""
        ready = 0
        while ready < ranks:
            line = process.stderr.readline()
            assert line, process.wait()
            ready += line.endswith("ready\n")


ENVIRONMENTS = ("sh", "-c", 'exec env -0 >"env.$RANK"')
