"""One rank as a node starts it and writes it down, without the node's preparations and its monitor.

    one_rank.py ARCHIVE RUN_DIRECTORY ATTEMPT NODE PROGRAM...

The rank is that of RANK and LOCAL_RANK. It hears what this process hears, reads its standard input, and prints to its
standard output; this process ends as it does.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path


def main(archive: str, run: str, attempt: str, node: str, *program: str) -> None:
    sys.path.insert(0, archive)
    from llmlaunch.node.event_loop import EventLoop
    from llmlaunch.node.files import RecordAppender
    from llmlaunch.node.node_environment import PROBE_VARIABLE, probe_variable, put_first
    from llmlaunch.node.node_log import NodeLog
    from llmlaunch.node.node_ranks import NodeRanks, StartedRank, environment_number
    from llmlaunch.node.signals import end_like
    from llmlaunch.node.stacks import RankStacks
    from llmlaunch.rundir.file_names import RANKS, attempt_folder

    class Unnamed(NodeLog):
        """Written at once, without the rank's name."""

        def put(self, lines: bytes) -> None:
            os.write(1, re.sub(rb"^\[rank\d+\]: ", b"", lines, flags=re.MULTILINE))

    environment, folder = dict(os.environ), attempt_folder(Path(run), attempt)
    numbers = [environment_number(environment, name) for name in ("RANK", "LOCAL_RANK")]
    stacks, hook = None, Path(run) / "hook"
    if (hook / "sitecustomize.py").exists():
        put_first(environment, str(hook))
        stacks = RankStacks(folder, node, numbers[0], None)
        environment[PROBE_VARIABLE] = probe_variable(Path(run), attempt, node, *numbers)

    def hear(number: int) -> None:
        if number == signal.SIGUSR1:
            ranks.save()
        elif number == signal.SIGUSR2:
            ranks.ask_for_stacks()
        else:
            ranks.end(number)

    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    loop = EventLoop(heard, hear, lambda: ranks.reap() and None)
    write = RecordAppender(folder / RANKS / f"{node}.jsonl").append_or_say
    rank = StartedRank(node, environment, stacks)
    ranks = NodeRanks([rank], loop, Unnamed(1), write, lambda task: task(), lambda lines: None)
    os.devnull = f"/proc/self/fd/{os.dup(0)}"  # what ranks read otherwise
    ranks.start(program, Path.cwd())
    loop.run(lambda: ranks.have_ended)
    if rank.code is not None and rank.code < 0:
        end_like(-rank.code)
    os._exit(rank.code or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
