"""`llmlaunch report`: what became of one run, as a summary, as JSON, or as a page for a browser."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.app.run_lookup import directory_of
from llmlaunch.cli.next_steps import Step
from llmlaunch.cli.on_host import HostCommand
from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.errors import UserError
from llmlaunch.launchers.run_files import can_be_resumed
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.launchers.ssh.host import Host


STDOUT = Path("-")


class ReportCommand(HostCommand):
    """With --on the page comes from the host, and is written here."""

    def run_on(self, host: Host, ctx: click.Context) -> int:
        html = ctx.params["html"]
        if html is None or html == STDOUT:
            return super().run_on(host, ctx)
        from llmlaunch.report.page import write_page

        def drawn() -> str:
            with tempfile.TemporaryFile() as page:
                code = host.run(self.words(ctx, html=STDOUT), page)
                if code != 0:
                    ctx.exit(code)
                page.seek(0)
                return page.read().decode(errors="replace")

        write_page(html, drawn)
        notify(f"wrote {html}: open it in a browser")
        return 0


@click.command("report", cls=ReportCommand)
@click.argument("run", metavar="RUN|DIR")
@click.option(
    "--html", type=click.Path(path_type=Path), help="Write all of it as a page for a browser, .html; - is stdout."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report_command(run: str, html: Path | None, as_json: bool) -> None:
    """Say how RUN went: its state and cause, attempts and lost time, and its memory and step time against what was
    predicted. With --html as one page, with curves, that loads nothing from anywhere.

    \b
    llmlaunch report last
    llmlaunch report last --html report.html

    Exit code 2: there is no such run, or the page cannot be written.
    """
    from llmlaunch.app.run_report import run_report

    if html == STDOUT and as_json:
        raise UserError("--html -, --json: both write to stdout; choose one")
    directory = directory_of(run, notify)
    report = run_report(directory, notify)
    if html == STDOUT:
        from llmlaunch.report.run_page import run_page

        say(run_page(report, to_type("report", run, "--html", html)))
        return
    if html is not None:
        from llmlaunch.report.run_page import write_run_page

        write_run_page(report, to_type("report", run, "--html", html), html)
        notify(f"wrote {html}: open it in a browser")
    if as_json:
        print_json(report)
        return
    if html is None:
        from llmlaunch.report.run_summary_text import run_summary_text

        say(run_summary_text(report))
    steps = [] if html is not None else [(to_type("report", run, "--html", "report.html"), "with curves")]
    say_next(*steps, *_after(report["state"]["phase"], run, can_be_resumed(directory)))


def _after(phase: str, run: str, resumable: bool) -> list[Step]:
    """Return what to type about a run in this phase. Only a run that llmlaunch rendered can be resumed."""
    if phase in ("failed", "stopped", "cancelled"):
        again = [(to_type("resume", run), "go on from there")] if resumable else []
        return [(to_type("logs", run), "what its nodes printed"), *again]
    if phase in ("refused", "not submitted"):
        return [(to_type("resume", run), "submits it")] if resumable else []
    if phase in ("running", "pending"):
        return [(to_type("status", "--watch", run), "watch it")]
    return [(to_type("accuracy"), "all measured runs")]
