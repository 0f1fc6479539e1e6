"""What slurm/cli_filter.lua adds to an sbatch: the same script with and without the filter, in turn, on a real cluster
on this machine.

A script that starts no training: bar at most 1.0 s more on a quiet machine. Scripts that it has to ask about: one
with a word of a training, and a training. The yardstick of each pair is a Python that imports numpy, click and yaml.
All jobs wait on hold.

    python benchmarks/cli_filter.py [PAIRS]
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "slurm")]

from one_machine import Cluster, install, new_cluster, throw_away  # noqa: E402
from test_cli_filter import FILTER, PLAIN, TRAINING  # noqa: E402

SCRIPTS = {
    "no training": PLAIN,
    "another script, no training": PLAIN + "bash other.sh\n",
    "asked about, no training": PLAIN + "python constraints_of_train.py\n",
    "a training": TRAINING.replace("$1", "1"),
}


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    install()
    cluster = new_cluster({})
    try:
        cluster.do("up", "1")
        with tempfile.TemporaryDirectory() as folder:
            filtered = with_filter(cluster, Path(folder))
            for name, script in SCRIPTS.items():
                job = Path(folder) / "job.sbatch"
                job.write_text(script)
                compare(name, job, cluster, filtered, pairs)
    finally:
        throw_away(cluster)


def with_filter(cluster: Cluster, folder: Path) -> Path:
    """Return a slurm.conf with the filter of a site that has installed it."""
    etc = folder / "etc"
    shutil.copytree(cluster.conf.parent, etc)
    (etc / "slurm.conf").write_text(cluster.conf.read_text() + "CliFilterPlugins=lua\n")
    program = folder / "llmlaunch"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT / "wrapper"} exec {sys.executable} -m llmlaunch "$@"\n')
    program.chmod(0o755)
    text = FILTER.read_text().replace('LLMLAUNCH = "llmlaunch"', f'LLMLAUNCH = "{program}"')
    text = text.replace("local CLUSTERS = {", 'local CLUSTERS = { train = "h100-80gb-x8",')
    (etc / "cli_filter.lua").write_text(text)
    return etc / "slurm.conf"


def compare(name: str, job: Path, cluster: Cluster, filtered: Path, pairs: int) -> None:
    """Print what the filter adds, in seconds and in yardsticks: medians of pairs, the first of which is not counted."""
    without, added, ratios = [], [], []
    for _ in range(pairs + 1):
        bare = seconds(job, cluster, cluster.conf)
        without.append(bare)
        added.append(seconds(job, cluster, filtered) - bare)
        ratios.append(added[-1] / yardstick())
    bare, more, ratio = (statistics.median(values[1:]) for values in (without, added, ratios))
    print(
        f"{name}: sbatch {bare:.3f} s; the filter adds {more:.3f} s ({min(added[1:]):.3f} to {max(added[1:]):.3f}), "
        f"{ratio:.2f} yardsticks ({min(ratios[1:]):.2f} to {max(ratios[1:]):.2f})"
    )


def yardstick() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy, click, yaml"], check=True)
    return time.perf_counter() - start


def seconds(job: Path, cluster: Cluster, conf: Path) -> float:
    start = time.perf_counter()
    words = ["sbatch", "--hold", "--output=/dev/null", str(job)]
    subprocess.run(words, check=True, capture_output=True, env={**cluster.environment, "SLURM_CONF": str(conf)})
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
