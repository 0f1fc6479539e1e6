"""A trainer for tests: steps, saves and comes back as the shipped DeepSpeed script does, without torch.

    slow_saver.py --steps 400 --step-seconds 0.2 --save FOLDER --save-seconds 90 [--save-interval 50] [--together]

Rank 0 prints the script's lines. The first step begins once every rank can be told. Told by SIGTERM, any rank makes
rank 0 save after the step that runs: for `--save-seconds` it is busy, then FOLDER/step-N/state.json and at last
FOLDER/latest hold the step. All ranks then exit with 0, and say how often they were told. Started again it goes on
after the step FOLDER/latest names. With `--together` the ranks hold connections, as those of a real trainer do, and
fail when one of them is gone. Once there is a file FOLDER/hurry, a step takes no time. What it does not know
(--deepspeed ...) it ignores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ.get("RANK", "0"))
        self.times_told = 0
        attempt = os.environ.get("LLMLAUNCH_ATTEMPT", str(os.getppid()))
        # what ranks say to each other: real trainers agree by an all-reduce
        self.somebody_told: Path = options.save / f".told-{attempt}"
        self.over: Path = options.save / f".over-{attempt}"
        ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
        self.ready = [options.save / f".ready-{attempt}-{rank}" for rank in ranks]

    def connect(self) -> None:
        """Rank 0 has a connection to each other rank. The nodes of the tests are this machine, where the kernel closes
        what a killed node had open."""
        place = "\0llmlaunch-" + os.environ["LLMLAUNCH_ATTEMPT"]
        others = int(os.environ["WORLD_SIZE"]) - 1
        if self.rank == 0:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(place)
            listener.listen(others)
            connections = [listener.accept()[0] for _ in range(others)]
        else:
            connections = [socket.socket(socket.AF_UNIX)]
            while connections[0].connect_ex(place):
                time.sleep(0.1)
        for connection in connections:
            threading.Thread(target=self.miss, args=(connection,), daemon=True).start()

    def miss(self, connection: socket.socket) -> None:
        """End when the other side is gone before the training is over."""
        connection.recv(1)
        if not self.times_told and not self.somebody_told.exists() and not self.over.exists():
            say(f"rank {self.rank}: RuntimeError: Connection closed by peer")
            os._exit(1)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.times_told += 1

    def train(self) -> None:
        self.options.save.mkdir(parents=True, exist_ok=True)
        self.ready[self.rank].touch()
        if self.rank == 0:
            while not all(path.exists() for path in self.ready):
                time.sleep(0.05)
            self.lead()
            self.over.touch()
        else:
            self.follow()

    def lead(self) -> None:
        steps, began = self.options.steps, self.last_saved()
        if began:
            say(f"resumed after step {began}")
        for step in range(began + 1, steps + 1):
            seconds = 0.0 if (self.options.save / "hurry").exists() else self.options.step_seconds
            pause(seconds)
            say(f"step {step}/{steps} | loss {10 / (step + 1):.4f} | {seconds:.2f} s/step | 1000 tokens/s")
            if self.times_told or self.somebody_told.exists():
                self.save(step)
                say(f"saved step {step} after SIGTERM")
                return
            if self.options.save_interval and step % self.options.save_interval == 0:
                self.save(step)
                say(f"saved step {step}")

    def follow(self) -> None:
        while not self.over.exists():
            if self.times_told:
                self.somebody_told.touch()
            time.sleep(0.1)

    def save(self, step: int) -> None:
        say(f"saving step {step}")
        pause(self.options.save_seconds)
        folder = self.options.save / f"step-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        latest = self.options.save / "latest"
        latest.with_suffix(".new").write_text(f"step-{step}")
        latest.with_suffix(".new").replace(latest)

    def last_saved(self) -> int:
        latest = self.options.save / "latest"
        if not latest.exists():
            return 0
        return int(json.loads((self.options.save / latest.read_text() / "state.json").read_text())["step"])


def pause(seconds: float) -> None:
    """Sleeps so long, whatever signals come."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(left)


def say(line: str) -> None:
    print(line, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--save-seconds", type=float, default=0.0)
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--together", action="store_true")
    return parser.parse_known_args()[0]


def main() -> None:
    trainer = Trainer(arguments())
    signal.signal(signal.SIGTERM, trainer.hear)
    if trainer.options.together:
        trainer.connect()
    trainer.train()
    if trainer.times_told:
        say(f"rank {trainer.rank} was told {trainer.times_told} times")
    sys.exit(0)


if __name__ == "__main__":
    main()
