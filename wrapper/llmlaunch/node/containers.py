"""The container in which the nodes train: what is mounted into it, and the words that enter it. An image of a registry
is imported once on each node, by a step of its own."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .files import say
from .slurm_steps import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from ..rundir.run_file import ContainerRules


# A named container outlives its job, unless the site has set container_scope=job. So this job's are removed by enroot's
# own command, and with them those of jobs that SLURM ended before they could. (pyxis hides a job's ENROOT_ folders from
# enroot.)
REMOVE = """
command -v enroot >/dev/null || exit 0
unset "${!ENROOT_@}"
for name in $(enroot list); do
  [[ $name =~ ^pyxis_([0-9]+_)?"$1"([0-9]+)-[0-9]+$ ]] || continue
  job=${BASH_REMATCH[2]}
  [[ $job != "$0" && " ${*:2} " = *" $job "* ]] || enroot remove -f "$name"
done
"""


class ContainerError(Exception):
    """Why the container cannot be entered: one sentence for a person."""


class StepContainer:
    """`record` is `container` of run.json's `job`."""

    def __init__(self, record: ContainerRules, run_directory: Path, start: str, environment: Mapping[str, str]) -> None:
        """`start` is that of the job: what another start has left half done is never taken for the image. Raises
        ContainerError."""
        self.image, self.runtime = record["image"], record["runtime"]
        self.is_imported = record["is_imported"]
        self._has_gpus = record["has_gpus"]
        self._run_directory = run_directory
        self._mounts = mounts(record, run_directory)
        self.prefix = f"llmlaunch-{environment.get('SLURM_CLUSTER_NAME', '')}-"
        self.name = f"{self.prefix}{environment.get('SLURM_JOB_ID', '')}-{start}"

    def options(self) -> list[str]:
        if self.runtime != "pyxis":
            return []
        # "no_exec": the container's files alone, whatever still runs there of an attempt before. Without a name: a
        # container of this step's own, removed with it.
        named = [f"--container-name={self.name}:no_exec"] if self.is_imported else []
        return [
            f"--container-image={self.image}",
            *named,
            f"--container-mounts={','.join(self._mounts)}",
            f"--container-workdir={self._run_directory}",
            "--no-container-mount-home",
        ]

    def enter(self) -> list[str]:
        """Return the words before the program. In the host's process namespace the monitor sees the trainers' processes
        as the driver counts them, and signals reach the node program. Raises ContainerError."""
        if self.runtime == "pyxis":
            return []
        command = next((name for name in ("apptainer", "singularity") if shutil.which(name)), None)
        if command is None:
            raise ContainerError(
                "neither apptainer nor singularity is on PATH; name its module under modules: of the cluster profile"
            )
        words = [command, "exec", "--no-home", "--pwd", str(self._run_directory), *(["--nv"] if self._has_gpus else [])]
        for mount in self._mounts:
            words += ["--bind", mount]
        return [*words, self.image]

    def import_options(self) -> list[str]:
        """Return what the srun that imports the image is told: it leaves a container by this name on each node."""
        return [f"--container-image={self.image}", f"--container-name={self.name}:create", "--no-container-mount-home"]

    def remove(self, srun: Sequence[str], job_id: str, seconds: float) -> None:
        """Remove the named containers of this job, and of jobs that are no more, where `srun` runs. Says what fails."""
        queued = ask("squeue", "-h", "-u", str(os.getuid()), "-o", "%A")
        if queued is not None:
            without = [word for word in srun if not re.match(r"--(?:no-)?container-", word)]  # of a site
            words = ["bash", "-c", REMOVE, job_id, self.prefix, *queued.split()]
            ask(*without, "--overlap", "--mem=0", *words, seconds=seconds)


def mounts(record: ContainerRules, run_directory: Path) -> list[str]:
    """Return the container's mounts, a folder before those in it: mounted later, it would hide them.

    What the recipe names by its path is in the container, too, at the same place: where this host has it, and no mount
    brings it. Of a file, or the beginning of several files' names, the folder. Raises ContainerError.
    """
    if re.search(r"[,:\n]", str(run_directory)):
        raise ContainerError(
            "the run directory's path holds a comma, colon or line break, which container mounts cannot: "
            f"{run_directory}"
        )
    wanted = [f"{run_directory}:{run_directory}", *record["mounts"]]
    if record["makes"]:
        try:
            Path(record["makes"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            say(f"cannot make {record['makes']} here ({error.strerror}); the trainers will say whether they can")
    for path in record["paths"]:
        folder = path if Path(path).is_dir() else _folder_of_files(path)
        if folder:
            wanted.append(f"{folder}:{folder}")
    chosen: list[str] = []
    for mount in sorted(wanted, key=lambda mount: _target(mount).encode()):
        if not _is_brought(mount, chosen):
            chosen.append(mount)
    return chosen


def _folder_of_files(beginning: str) -> str:
    """Return the folder of the files whose names begin so; empty where there are none, or they lie in the root."""
    files = glob.glob(glob.escape(beginning) + "*")  # noqa: PTH207 - the beginning of names, with its folder
    return str(Path(beginning).parent).rstrip("/") if files else ""


def _target(mount: str) -> str:
    return [*mount.split(":"), ""][1]


def _is_brought(mount: str, before: Sequence[str]) -> bool:
    """Whether the innermost of the mounts `before` that its place lies in is the same, or brings the same folder there
    to be written."""
    place = _target(mount)
    above = ""
    for other in before:
        if f"{place}/".startswith(_target(other).rstrip("/") + "/"):
            above = other
    if mount == above:
        return True
    source, target, flags = [*above.split(":"), "", "", ""][:3]
    is_plain = mount == f"{place}:{place}"
    return is_plain and bool(source) and source == target and "ro" not in re.split(r"[+,]", flags)


IMPORT_SECONDS = 3600.0
REMOVE_SECONDS, REMOVE_LATE_SECONDS = 120.0, 20.0  # the latter where the job's time is nearly up
_IMPORTED = "imported"


class StepRunner(NamedTuple):
    """How a step beside the training is run: `srun` returns its words for nodes and a log (%N is the node), `run` runs
    them for so many seconds at most."""

    srun: Callable[[Sequence[str], str, str], list[str]]
    run: Callable[[Sequence[str], float], None]


class NodeImages:
    """`ready` are the nodes that have the image."""

    def __init__(self, container: StepContainer, job_id: str, steps: StepRunner) -> None:
        self.ready: set[str] = set()
        self.image = container.image
        self._container, self._job_id, self._steps = container, job_id, steps

    def bring_to(self, nodes: Collection[str], folder: Path, seconds: float) -> None:
        """Import the image on these nodes. What pyxis says is in `folder`, a log for each."""
        folder.mkdir(exist_ok=True)
        srun = self._srun(sorted(nodes), folder)
        self._container.remove(srun, self._job_id, REMOVE_SECONDS)
        self._steps.run([*srun, *self._container.import_options(), "sh", "-c", f"echo {_IMPORTED}"], seconds)
        for node in nodes:
            with contextlib.suppress(OSError):
                log = (folder / f"{node}.log").read_text(encoding="utf-8", errors="replace")
                if _IMPORTED in log.splitlines():
                    self.ready.add(node)

    def remove(self, held: Sequence[str], folder: Path, is_late: bool) -> None:
        nodes = [node for node in held if node in self.ready]
        self.ready.clear()
        if nodes:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
            seconds = REMOVE_LATE_SECONDS if is_late else REMOVE_SECONDS
            self._container.remove(self._srun(nodes, folder), self._job_id, seconds)

    def _srun(self, nodes: Sequence[str], folder: Path) -> list[str]:
        return self._steps.srun(nodes, f"{folder}/%N.log", f"{folder}/%N.log")
