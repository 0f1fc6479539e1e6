"""What `llmlaunch submit` and `llmlaunch status` take beside SLURM's own commands, on a real cluster on this machine.

submit: from the start of the process, planning and rendering included, until SLURM has taken the job, against a bare
`sbatch` of the script it rendered, in pairs.
Bar: at most 1.0 s more. status: of 200 runs, against one `squeue` and one `sacct` for them, one after the other. Bar:
at most twice as long. The cluster has slurmdbd and MariaDB; all jobs wait on hold.

    python benchmarks/slurm_commands.py [PAIRS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "slurm"))

from one_machine import Cluster, install, new_cluster, throw_away  # noqa: E402

RUNS = 200
RECIPES = ("llama3-70b.yaml", "llama3-8b.yaml")


def seconds(argv: list[str], cluster: Cluster, cwd: Path) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True, cwd=cwd, env=cluster.environment)
    return time.perf_counter() - start


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    os.environ["PYTHONPATH"] = str(ROOT / "wrapper")
    install(accounting=True)
    cluster = new_cluster({"ACCOUNTING": "1"})
    try:
        cluster.do("up", "8")
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_DATA_HOME"] = folder
            for recipe in RECIPES:
                submit(cluster, recipe, Path(folder), pairs)
            status(cluster, Path(folder), pairs)
    finally:
        throw_away(cluster)


def submit(cluster: Cluster, recipe: str, folder: Path, pairs: int) -> None:
    words = ["nodes=8", "slurm.hold=true"]
    command = [sys.executable, "-m", "llmlaunch", "submit", str(ROOT / "recipes" / recipe), *words, "-o"]
    times = []
    for number in range(pairs + 1):
        run_dir = folder / f"{recipe}-{number}"
        began = time.time()
        seconds([*command, str(run_dir)], cluster, folder)
        ours = (run_dir / "submission.json").stat().st_mtime - began  # written when SLURM has taken the job
        bare = seconds(["sbatch", "--parsable", "job.sbatch"], cluster, run_dir)
        times.append((ours, bare))
    times = times[1:]  # the first warms the file cache and makes the store
    more = sorted(ours - bare for ours, bare in times)
    print(f"submit {recipe}: {statistics.median(a for a, _ in times):.3f} s, sbatch", end=" ")
    print(f"{statistics.median(b for _, b in times):.3f} s; {statistics.median(more):.3f} s more", end=" ")
    print(f"({more[0]:.3f} to {more[-1]:.3f}); bar: 1.0")
    cluster.ask("scancel", "--me")


def status(cluster: Cluster, folder: Path, pairs: int) -> None:
    script = next(folder.glob("*-1")) / "job.sbatch"
    lines = "\n".join([f"sbatch --parsable {script}"] * RUNS)
    jobs = cluster.ask("sh", "-c", f"cd {folder}\n{lines}").split()
    directories = []
    for job in jobs:
        directory = folder / f"run{job}"
        directory.mkdir()
        record = {"schema": 1, "launcher": "slurm", "job_id": job, "submitted_at": time.time(), "cluster": None}
        (directory / "submission.json").write_text(json.dumps(record))
        directories.append(str(directory))
    compare("all wait", cluster, folder, jobs, directories, pairs)
    cluster.ask("scancel", *jobs[: RUNS // 2])  # on hold: they leave no status.json
    compare("half were cancelled, nobody has looked since", cluster, folder, jobs, directories, pairs, forget=True)
    compare("half were cancelled", cluster, folder, jobs, directories, pairs)


def compare(
    what: str, cluster: Cluster, folder: Path, jobs: list[str], directories: list[str], pairs: int, forget: bool = False
) -> None:
    """`forget`: what an earlier look has noted of each end."""
    listed, day = ",".join(jobs), time.strftime("%Y-%m-%d", time.localtime(time.time() - 86400))
    bare = f"squeue -h -t all -j {listed} -o '%i|%T|%r'; sacct -X -D -S {day} -P -n -j {listed} -o JobID,State,ExitCode"
    ours = [sys.executable, "-m", "llmlaunch", "status", *directories]
    times = []
    for _ in range(2 * pairs + 1):
        for directory in directories if forget else []:
            (Path(directory) / "ended.json").unlink(missing_ok=True)
        times.append((seconds(ours, cluster, folder), seconds(["sh", "-c", bare], cluster, folder)))
    times = times[1:]
    ratios = sorted(a / b for a, b in times)
    print(
        f"status of {len(jobs)} runs, {what}: {statistics.median(a for a, _ in times):.3f} s, squeue and sacct", end=" "
    )
    print(f"{statistics.median(b for _, b in times):.3f} s; ratio {statistics.median(ratios):.2f}", end=" ")
    print(f"({ratios[0]:.2f} to {ratios[-1]:.2f}); bar: 2")


if __name__ == "__main__":
    main()
