"""What `--on HOST[:FOLDER]` names: a host with SLURM, and the folder there for run directories. One look, which changes
nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.launchers.run_files import name_run
from llmlaunch.launchers.ssh.connection import Connection, is_ssh_host
from llmlaunch.launchers.ssh.home import Home, write_home
from llmlaunch.rundir.foreign_values import whole_number_in

_DEFAULT_RUNS = "llmlaunch-runs"
_OLDEST_PYTHON = (3, 8)  # of node.pyz, too
_LOOK = (
    'echo "user=$EUID"; echo "home=$HOME"; echo "runs=${LLMLAUNCH_RUNS:-}"; '
    'for name in sbatch tar gzip python3; do echo "$name=$(command -v $name)"; done; '
    'echo "version=$(python3 -c "import sys; print(*sys.version_info[:2])" 2>/dev/null)"'
)
# A dataset may be named by the prefix that its two files share.
_LACKING = (
    'for word in "$@"; do value=${word#?:}; case $word in '
    'r:*) [ -e "$value" ] || [ -e "$value.idx" ] || echo "$word";; '
    'w:*) until [ -e "$value" ]; do value=${value%/*}; value=${value:-/}; done; '
    '[ -d "$value" ] && [ -w "$value" ] || echo "$word";; '
    'v:*) [ -n "$(printenv "$value")" ] || echo "$word";; esac; done'
)


@dataclass(frozen=True)
class RemoteHost:
    """A host whose SLURM takes jobs. `runs` is the absolute path of the folder for run directories."""

    name: str
    user_id: int
    runs: str
    sbatch: str

    def settle(self, run_dir: Path) -> Home:
        """Write down that a run directory of this machine lives there from now on, in a folder named by its id. Raises
        UserError where it cannot be written."""
        home = Home(self.name, f"{self.runs}/{name_run(run_dir)}", self.user_id)
        write_home(run_dir, home)
        return home

    def lacking(self, read: Sequence[str], written: Sequence[str], variables: Sequence[str]) -> frozenset[str]:
        """Return which of the paths that are read are not there, which of those that are written cannot be, and which
        of the variables are not set. Raises UserError where the host is not reached."""
        questions = [*(f"r:{path}" for path in read), *(f"w:{path}" for path in written)]
        questions += [f"v:{name}" for name in variables]
        if not questions:
            return frozenset()
        reply = Connection(self.name).run(_LACKING, *questions)
        return frozenset(line[2:] for line in reply.output.splitlines())


def look_at(target: str) -> RemoteHost:
    """Look at HOST or HOST:FOLDER. Raises UserError where it is not reached or lacks what a run needs there."""
    match = re.fullmatch(r"((?:[^:\[\]]*@)?(?:\[[^\]]*\]|[^:\[\]]*))(?::(.*))?", target, re.DOTALL)
    host, folder = (match[1], match[2] or "") if match else (target, "")
    if not is_ssh_host(host):
        raise UserError(
            f"--on {target}: {host!r} is no host as ssh takes it; write --on HOST or --on HOST:FOLDER, with a HOST of "
            "your ~/.ssh/config or USER@MACHINE"
        )
    if not folder.isprintable():
        raise UserError(f"--on {target!r}: the folder holds characters that no folder should; name another")
    reply = Connection(host).run(_LOOK)
    answers = dict(line.partition("=")[::2] for line in reply.output.splitlines())
    _refuse_without(host, answers)
    home = answers["home"]
    runs = folder or answers.get("runs") or _DEFAULT_RUNS
    runs = home + runs[1:] if runs == "~" or runs.startswith("~/") else runs
    runs = (runs if runs.startswith("/") else f"{home}/{runs}").rstrip("/")
    return RemoteHost(host, int(answers["user"]), runs, answers["sbatch"])


def _refuse_without(host: str, answers: dict[str, str]) -> None:
    if whole_number_in(answers.get("user")) is None or not answers.get("home", "").startswith("/"):
        raise UserError(f"{host}: it did not say who and where you are there; is it a Unix machine with bash?")
    profile = "on the PATH of a login shell there; name a login node of the cluster, or set PATH in ~/.bash_profile"
    if not answers.get("sbatch"):
        raise UserError(f"{host}: no sbatch, so no SLURM, {profile}")
    for name in ("tar", "gzip", "python3"):
        if not answers.get(name):
            raise UserError(f"{host}: no {name} {profile}")
    words = answers.get("version", "")[:40].split()
    version = tuple(number for number in map(whole_number_in, words) if number is not None)
    if version < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        raise UserError(f"{host}: its python3 is older than {oldest} or does not run; put a newer one {profile}")
