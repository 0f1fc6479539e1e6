"""Pictures of a real terminal for the docs: `make docs-screens` types the pages in tmux and writes docs/screens/*.svg.

A page's block that is followed by `![...](screens/NAME.svg)` gives the picture NAME: its last command and what that
printed, at 80 columns. The picture's description holds the same as text, for readers who cannot see it and for tests.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import time
from html import escape, unescape
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from support.snippets import DOCS, ROOT, snippets_of
from support.terminal import Terminal

SCREENS = DOCS / "screens"
PAGES = (ROOT / "README.md", DOCS / "tutorial.md")
COLUMNS, ROWS, LONGEST = 80, 24, 34
HOME = "/home/you"  # what stands for the folder that a page was typed in


# rich's own format loads a font from elsewhere
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
_FORMAT = re.sub(r"(?s)@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT).replace("Fira Code, monospace", _FONT)
_FORMAT = _FORMAT.replace(">\n", ">\nDESCRIPTION\n", 1).replace(' clip-path="url(#{unique_id}-clip-terminal)"', "")


def missing_words(name: str, output: str) -> set[str]:
    """Return the words of a picture that a command's output does not have: the picture is then old. Figures may differ
    from machine to machine."""
    svg = (SCREENS / f"{name}.svg").read_text(encoding="utf-8")
    lines = unescape(svg.partition("<desc>")[2].partition("</desc>")[0]).splitlines()
    assert lines, name
    shown = [line for line in lines if not line.startswith("$ ") and not line.endswith("...")]
    return _words(" ".join(shown)) - _words(output)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{4,}", text))


def main() -> None:
    """Type each page in a folder and home of its own, and write its pictures."""
    SCREENS.mkdir(exist_ok=True)
    for page in PAGES:
        with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
            _type_page(page, Path(folder))


def _type_page(page: Path, folder: Path) -> None:
    home, prompts = folder / "home", folder / "prompts"
    home.mkdir()
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "PROMPT_COMMAND": f"echo >> {prompts}",  # a line for every command that has ended
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_CACHE_HOME": str(home / ".cache"),
    }
    terminal = Terminal(folder, COLUMNS, ROWS, **variables)
    snippets = snippets_of(page)
    last = max(number for number, snippet in enumerate(snippets) if snippet.picture)
    try:
        _type_line(terminal, "cd", prompts)
        for snippet in snippets[: last + 1]:
            if snippet.place == "here" and snippet.language == "sh":
                for line in snippet.text.splitlines():
                    _type_line(terminal, "clear", prompts)
                    terminal.command("clear-history")
                    _type_line(terminal, re.sub(r"\s+#.*", "", line), prompts)
            if snippet.picture:
                text = terminal.text("-e", "-J", "-S", "-").replace(os.path.realpath(home), HOME)
                (SCREENS / f"{snippet.picture}.svg").write_text(_svg(text, snippet.picture), encoding="utf-8")
    finally:
        terminal.close()


def _type_line(terminal: Terminal, line: str, prompts: Path) -> None:
    """Type a line, and wait until its command has ended."""
    count = prompts.stat().st_size if prompts.exists() else 0
    terminal.type(line)
    deadline = time.monotonic() + 900
    while not prompts.exists() or prompts.stat().st_size == count:
        assert time.monotonic() < deadline, f"{line} takes longer than 15 minutes"
        time.sleep(0.2)
    time.sleep(0.3)  # the prompt itself


def _svg(text: str, name: str) -> str:
    lines = Text.from_ansi(text).split("\n")
    while lines and lines[-1].plain.strip() in ("", "$"):
        lines.pop()
    if len(lines) > LONGEST:
        lines[LONGEST:] = [Text("...", style="dim")]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        line.rstrip()
        console.print(line, overflow="fold")
    description = "\n".join(line.plain.rstrip() for line in lines)
    svg = console.export_svg(title="", unique_id=name, code_format=_FORMAT)
    # fonts of other proportions than rich's own would lose their underscores
    svg = re.sub(r'(?s) clip-path="url\(#[^"]*\)"|<clipPath .*?</clipPath>\s*', "", svg)
    return svg.replace("DESCRIPTION", f"<desc>{escape(description)}</desc>") + "\n"


if __name__ == "__main__":
    main()
