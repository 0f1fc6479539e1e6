"""A verdict a person sees at a glance: in colour on a terminal, plain text everywhere else."""

from __future__ import annotations

import sys

__all__ = ["print_verdict"]


def print_verdict(text: str, safe: bool) -> None:
    """To stdout: the first line, which is the verdict, in green or red; the others as they are."""
    if not sys.stdout.isatty():
        print(text)
        return
    # imported here: a pipe or a script must not wait for it
    from rich.console import Console
    from rich.text import Text

    verdict, _, rest = text.partition("\n")
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(verdict, style="bold green" if safe else "bold red"))
    console.print(Text(rest))  # Text: what a person named is never markup
