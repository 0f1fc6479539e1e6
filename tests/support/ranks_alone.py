"""Starts the ranks of a node as torchrun does, without torch: it takes three seconds less of a core.

    ranks_alone.py --nnodes=N --nproc_per_node=M --node_rank=I --master_addr=A --master_port=P ... -- PROGRAM...

When a rank fails, it ends the others and exits with 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path


def python_without_torchrun(path: Path, python: str = sys.executable, launcher: Path = Path(__file__)) -> Path:
    """Write an interpreter: `python`, but this script, or a copy of it, starts ranks instead of torchrun."""
    python, script = shlex.quote(python), shlex.quote(str(launcher))
    job = '*torch.distributed.run*" -- "*'  # as train.sh starts it; an idle trainer is measured under torchrun itself
    short = f'case "$2 $*" in {job}) shift 2; exec {python} -S {script} "$@";; esac'
    path.write_text(f'#!/bin/sh\n{short}\nexec {python} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nnodes", "nproc_per_node", "node_rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("master_addr", "master_port"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_known_args(sys.argv[1:split])[0]
    ranks = [start(options, local, sys.argv[split + 1 :]) for local in range(options.nproc_per_node)]
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            for rank in ranks:
                rank.terminate()
            break
        time.sleep(0.05)
    codes = [rank.wait() for rank in ranks]
    sys.exit(any(codes))


def start(options: argparse.Namespace, local: int, program: list[str]) -> subprocess.Popen[bytes]:
    variables = {
        "RANK": options.node_rank * options.nproc_per_node + local,
        "LOCAL_RANK": local,
        "GROUP_RANK": options.node_rank,
        "WORLD_SIZE": options.nnodes * options.nproc_per_node,
        "LOCAL_WORLD_SIZE": options.nproc_per_node,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
    }
    return subprocess.Popen(program, env={**os.environ, **{name: str(value) for name, value in variables.items()}})


if __name__ == "__main__":
    main()
