"""The `llmlaunch` command: loads one command's module at a time, and turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import importlib
import sys

import click

from llmlaunch import __version__
from llmlaunch.cli.output import notify, say, standard_streams
from llmlaunch.errors import OutputLost, UserError

__all__ = ["cli", "load_command", "main"]

# command -> its module in llmlaunch.cli, imported when the command is used, and one line of help
COMMANDS = {
    "init": ("init", "Write a starter recipe, or a profile of this cluster."),
    "check": ("planning", "Validate and plan a recipe, show its memory and time; submit nothing."),
    "plan": ("planning", "Show the ranked layouts and why others were refused."),
    "compare": ("compare", "Rank clusters and numbers of nodes by days, GPU-hours and price."),
    "diff": ("compare", "Say what differs between two recipes, plans or runs, and what it costs."),
    "render": ("planning", "Write the run directory."),
    "rehearse": ("rehearse", "Run or trace single ranks of the planned job before it is submitted."),
    "submit": ("submit", "Render, submit and record a run."),
    "observe": ("observe", "Run a training command of your own; write down its peaks, its end and its cause."),
    "status": ("runs", "Say what became of runs."),
    "logs": ("logs", "Print what the nodes of a run have printed."),
    "cancel": ("jobs", "Stop runs."),
    "resume": ("jobs", "Submit a run directory again, or for the first time."),
    "runs": ("runs", "List the runs and what became of them."),
    "nodes": ("nodes", "List the nodes that submit leaves out; forgive one."),
    "collect": ("measurements", "Take the peaks of finished runs into the store."),
    "measurements": ("measurements", "List, import and export measurements."),
    "accuracy": ("accuracy", "Score predictions against measured records."),
    "qualify": ("qualify", "Measure six small layouts on your own devices against their predictions."),
    "calibrate": ("calibrate", "Learn from measured runs what predictions leave out; list, show, go back."),
    "explain-args": ("planning", "Say what each rendered argument and variable of a run follows from."),
    "doctor": ("doctor", "Look at the site: its network, and what its containers hold."),
}


def load_command(name: str) -> click.Command:
    """Import and return a command: `explain-args` is `explain_args_command` in its module."""
    module = importlib.import_module(f"llmlaunch.cli.{COMMANDS[name][0]}")
    command: click.Command = getattr(module, f"{name.replace('-', '_')}_command")
    return command


class LazyGroup(click.Group):
    """Imports a command's module only when that command runs, so that `check` starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmlaunch")
def cli() -> None:
    """Plan, launch and measure LLM training: memory predicted before the queue, true peaks learned from after it.

    Start with `llmlaunch init`, then `llmlaunch check recipe.yaml` and `llmlaunch submit recipe.yaml`.
    """


def main() -> None:
    """Entry point. Exit codes: 0 fine, 1 a watched run that failed, a full disk or our own bug, 2 a person's mistake, 3
    nothing safe, 4 the scheduler refused, 130 Ctrl-C, 141 nobody reads the output any more."""
    # Almost all that a command makes lives to its end; looking for garbage as often as Python does is 7 % of `submit`.
    gc.set_threshold(50_000, 20, 100)
    with standard_streams():
        code = _run()
    sys.exit(code)


def _run() -> int:
    try:
        try:
            return _command()
        finally:
            sys.stdout.flush()
    except OutputLost as lost:
        if not lost.reader_gone:  # who closed a pipe knows
            notify(f"error: {lost}")
        return lost.exit_code


def _command() -> int:
    try:
        result = cli.main(standalone_mode=False)
        return result if isinstance(result, int) else 0
    except UserError as mistake:
        notify(f"error: {mistake}")
        return mistake.exit_code
    except click.exceptions.Abort:
        return 130
    except click.ClickException as usage:
        usage.show()
        return usage.exit_code
    except OutputLost:
        raise
    except OSError as failure:
        if failure.filename is None:
            return _our_bug()
        # a file or folder that cannot be used, which no reader of it has a better sentence for
        notify(f"error: {str(failure.filename)[:200]}: {failure.strerror}")
        return UserError.exit_code
    except Exception:
        return _our_bug()


def _our_bug() -> int:
    import traceback

    traceback.print_exc()
    say(
        f"\nThis is a bug of llmlaunch {__version__}, not yours. Please report it with the lines above and the "
        "command you typed.",
        err=True,
    )
    return 1


if __name__ == "__main__":
    main()
