"""`llmlaunch observe`: a command of a person's own, observed; the door to node/observe.py."""

from __future__ import annotations

from pathlib import Path

import click

from llmlaunch.cli.output import FiniteRange, notify
from llmlaunch.errors import UserError


@click.command("observe", context_settings={"allow_interspersed_args": False})
@click.option("--dir", "directory", metavar="DIR", help="Where to write; without it observed/NAME-JOB.")
@click.option("--interval", type=FiniteRange(0.05, 60), default=1.0, metavar="S", help="Between samples [1].")
@click.option(
    "--write-node-pyz",
    "archive",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Write node.pyz, which observes with any Python from 3.8 on and nothing installed, and run nothing.",
)
@click.argument("command", nargs=-1, metavar="-- COMMAND [ARG]...", type=click.UNPROCESSED)
def observe_command(directory: str | None, interval: float, archive: Path | None, command: tuple[str, ...]) -> int:
    """Run COMMAND, the launcher or trainer of a script of your own, and write down the true peak of each rank, its
    steps and what ended it, for `llmlaunch collect`.

    The command runs as it would without this: output, signals and exit code are its own. Put it before `torchrun`,
    `deepspeed`, `accelerate`, `python` or `srun` in your sbatch; after `srun`, each node or rank is observed by itself.

    \b
    llmlaunch observe -- torchrun --nproc-per-node 8 train.py
    """
    from llmlaunch.node.observe import main
    from llmlaunch.rendering.node_archive import OBSERVING, node_archive

    if archive is not None:
        from llmlaunch.rundir.files import replace_bytes

        if command:
            raise UserError("observe: --write-node-pyz runs nothing; leave out the command")
        replace_bytes(archive, node_archive(OBSERVING))
        notify(f"{archive}: put `python3 {archive} observe --` in front of your launcher")
        return 0
    place = [] if directory is None else ["--dir", directory]
    return main(
        [*place, "--interval", str(interval), "--", *command], "llmlaunch observe", lambda: node_archive(OBSERVING)
    )
