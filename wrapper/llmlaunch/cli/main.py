"""The `llmlaunch` command: loads one command's module at a time, and turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from llmlaunch import __version__
from llmlaunch.cli.output import notify, say, standard_streams
from llmlaunch.errors import OutputLost, UserError
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


# command -> its module in llmlaunch.cli, imported when the command is used, and one line of help
COMMANDS = {
    "init": ("init", "Write a starter recipe, or a profile of this cluster."),
    "check": ("check", "Plan a recipe, show its memory and time; submit nothing."),
    "plan": ("plan", "Show the ranked layouts and why others were refused."),
    "compare": ("compare", "Rank clusters and numbers of nodes by days and price."),
    "diff": ("compare", "Say what differs between two recipes, plans or runs."),
    "render": ("render", "Write the run directory."),
    "rehearse": ("rehearse", "Run or trace single ranks of the job before it is submitted."),
    "schema": ("schema", "Print the JSON Schema of a recipe or a result."),
    "submit": ("submit", "Render, submit and record a run."),
    "observe": ("observe", "Run your own training command; record its peaks and its end."),
    "status": ("runs", "Say what became of runs."),
    "report": ("report", "Show how a run went against its plan; as a page with --html."),
    "logs": ("logs", "Print what the nodes of a run have printed."),
    "cancel": ("jobs", "Stop runs."),
    "resume": ("jobs", "Submit a run directory again, or for the first time."),
    "runs": ("runs", "List the runs and what became of them."),
    "nodes": ("nodes", "List the nodes that submit leaves out; forgive one."),
    "collect": ("measurements", "Take the peaks of finished runs into the store."),
    "measurements": ("measurements", "List, import and export measurements."),
    "accuracy": ("accuracy", "Score predictions against measured records."),
    "calibrate": ("calibrate", "Learn from measured runs what predictions leave out."),
    "explain-args": ("render", "Say what each argument and variable of a run follows from."),
    "doctor": ("doctor", "Look at the site: its network, and what its containers hold."),
    "completion": ("completion", "Print what makes your shell complete commands, runs and keys."),
}

# every command stands under one of these, in this order, in the help
GROUPS = {
    "Plan": ("init", "check", "plan", "compare", "diff", "render", "rehearse", "explain-args", "schema"),
    "Launch": ("submit", "resume", "cancel", "observe"),
    "Watch": ("status", "logs", "runs", "report", "nodes"),
    "Learn": ("collect", "measurements", "accuracy", "calibrate"),
    "Set up": ("doctor", "completion"),
}
COMPLETION_VARIABLE = "_LLMLAUNCH_COMPLETE"  # how a shell asks for completions, which alone need more of a command


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
        if cmd_name not in COMMANDS:
            return None
        command = load_command(cmd_name)
        if COMPLETION_VARIABLE not in os.environ:
            return command
        from llmlaunch.cli.completion import completed

        return completed(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", COMMANDS[name][1]) for name in names if name in COMMANDS])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\nNext: {to_type('init', 'quickstart')}\n")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands without importing them, and the options."""
        from click.shell_completion import CompletionItem

        names = (name for name in COMMANDS if name.startswith(incomplete))
        return [CompletionItem(name, help=COMMANDS[name][1]) for name in names] + click.Command.shell_complete(
            self, ctx, incomplete
        )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmlaunch")
def cli() -> None:
    """Plan, launch and measure LLM training: memory predicted before the queue, true peaks learned from after it.

    Start with `llmlaunch init`, then `llmlaunch check recipe.yaml` and `llmlaunch submit recipe.yaml`.
    """


def main() -> None:
    """Entry point. Exit codes: 0 fine, 1 a watched run that failed, a full disk or our own bug, 2 a person's mistake, 3
    nothing safe, 4 the scheduler refused, 5 no verdict, 130 Ctrl-C, 141 nobody reads the output any more."""
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
        result = cli.main(standalone_mode=False, complete_var=COMPLETION_VARIABLE)
        return result if isinstance(result, int) else 0
    except UserError as mistake:
        notify(f"error: {mistake}")
        return mistake.exit_code
    except click.exceptions.Abort:
        return 130
    except click.ClickException as usage:
        from llmlaunch.cli.usage import usage_sentence

        sentence = usage_sentence(usage, sys.argv[1:])
        if sentence is None:
            usage.show()
        else:
            notify(f"error: {sentence}")
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
