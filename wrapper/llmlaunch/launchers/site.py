"""Asks the SLURM of this machine what `llmlaunch init --site` drafts a cluster profile from."""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Callable

from llmlaunch.cluster.slurm_site import Answers
from llmlaunch.errors import UserError
from llmlaunch.launchers.slurm.commands import Answer, SlurmCommands

__all__ = ["ask_site"]

TIMEOUT_SECONDS, TRIES = 30.0, 2
_RUNNERS = ("apptainer", "singularity")
_SHIPPED = "or start from a shipped profile (base: h100-80gb-x8, docs/sites.md)"


def ask_site(say: Callable[[str], None]) -> Answers:
    """Changes nothing. Raises UserError where there is no SLURM, or it does not answer; what only some sites have
    (accounting, a topology) may be missing."""
    if shutil.which("scontrol") is None:
        raise UserError(
            "init --site: no SLURM here (scontrol is not on PATH); run it on a login node of the cluster, " + _SHIPPED
        )
    commands = SlurmCommands(TIMEOUT_SECONDS, TRIES, say)
    # side by side: a site may have thousands of nodes
    needed = [commands.start(["scontrol", "show", what]) for what in ("config", "partition", "node")]
    optional = [commands.start(["scontrol", "show", "topology"]), commands.start(["srun", "--help"])]
    if shutil.which("sacctmgr") is not None:
        user = f"user={getpass.getuser()}"
        optional.append(commands.start(["sacctmgr", "-nP", "show", "assoc", user, "format=account,qos"]))
    config, partitions, nodes = (_needed(commands.insist(call)) for call in needed)
    topology, srun_help, *associations = (_optional(call.answer()) for call in optional)
    return Answers(
        config=config,
        partitions=partitions,
        nodes=nodes,
        topology=topology,
        srun_help=srun_help,
        associations="".join(associations),
        programs=tuple(name for name in _RUNNERS if shutil.which(name) is not None),
    )


def _needed(answer: Answer) -> str:
    if answer.code != 0:
        raise UserError(f"init --site: SLURM does not answer ({answer.words}); try again later, {_SHIPPED}")
    return answer.output


def _optional(answer: Answer) -> str:
    return answer.output if answer.code == 0 else ""
