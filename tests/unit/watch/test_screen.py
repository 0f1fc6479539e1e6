"""Lines for somebody who watches: in place on a terminal, plain elsewhere, and no harm where nobody is left."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from watched_run import TerminalStream

from llmlaunch.cli.output import standard_streams
from llmlaunch.errors import OutputLost
from llmlaunch.watch.screen import Screen
from support.terminal import Terminal

IN_PLACE = """
import sys, time
from pathlib import Path
from llmlaunch.watch.screen import Screen
screen = Screen(sys.stdout)
with screen.in_place():
    screen.show(["step 1", "of two runs"])
    screen.say("saving [red]no markup " + 90 * "x" + "y")
    screen.show(["step 2 \\x1b[2J" + 90 * "z"])
    while not Path("many").exists(): time.sleep(0.05)
    screen.show([f"run {n}" for n in range(40)])
    while not Path("end").exists(): time.sleep(0.05)
screen.say("the end")
"""


def test_on_a_terminal_the_last_lines_are_drawn_in_place_below_those_that_stay(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(IN_PLACE)
    terminal.type(f"cd {tmp_path}; clear; {sys.executable} program.py; echo code-$?")
    shown = terminal.until("step 2").splitlines()
    assert shown[:3] == ["saving [red]no markup " + 78 * "x", 12 * "x" + "y", "step 2 " + 90 * "z"]
    assert not any(shown[3:])
    (tmp_path / "many").touch()
    shown = terminal.until("and 12 more")
    assert "\n".join([*(f"run {n}" for n in range(28)), "... and 12 more"]) in shown
    assert "step" not in shown
    (tmp_path / "end").touch()
    shown = terminal.until("code-0")
    assert terminal.whole()
    assert "the end\ncode-0" in shown
    assert not re.search("step|run", shown)


def test_elsewhere_only_what_stays_is_written() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    with screen.in_place():
        screen.show(["step 1"])
        screen.say("saving")
    assert stream.getvalue() == "saving\n"


def test_a_sentence_is_folded_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal, pipe = TerminalStream(), io.StringIO()
    for stream in (terminal, pipe):
        Screen(stream).say_folded("The record lies in /store.db, its files in runs/a")
    assert terminal.getvalue() == "The record lies in /store.db,\n  its files in runs/a\n"
    assert pipe.getvalue() == "The record lies in /store.db, its files in runs/a\n"


WATCHES = """
import os, signal, sys, time
from llmlaunch.cli.output import standard_streams
from llmlaunch.errors import OutputLost
from llmlaunch.watch.screen import Screen, outliving_the_terminal
from pathlib import Path
lasting, out = sys.argv[1] == "lasting", Path(sys.argv[2])
with standard_streams():
    screen, other = Screen(sys.stdout, lasting), Screen(sys.stderr, lasting)
    try:
        with outliving_the_terminal():
            with screen.in_place():
                while not screen.gone:
                    screen.say("a step")
                    screen.show(["in place"])
                    time.sleep(0.01)
            for _ in range(3):
                screen.say("more")
                other.say("and more")
            print("what was never asked for", file=sys.stderr, flush=True)
        out.write_text("to the end")
    except OutputLost:
        out.write_text("nobody reads")
"""


def watch(lasting: str, out: Path, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", WATCHES, lasting, str(out)]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)


@pytest.mark.parametrize(("lasting", "end"), [("lasting", "to the end"), ("short", "nobody reads")])
@pytest.mark.parametrize("what", ["terminal", "pipe"])
def test_a_reader_that_goes_away(tmp_path: Path, what: str, lasting: str, end: str) -> None:
    ours, theirs = os.openpty() if what == "terminal" else os.pipe()
    child = watch(lasting, tmp_path / "out", theirs, theirs)
    os.close(theirs)
    said = b""
    while b"a step" not in said:
        said += os.read(ours, 100)
    os.close(ours)
    assert child.wait(20) == 0  # and no complaint of Python's own at exit, which would be 120
    assert (tmp_path / "out").read_text() == end


def test_a_full_disk_is_no_reader_that_went_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        with standard_streams(), pytest.raises(OutputLost, match="No space") as lost:
            Screen(sys.stdout).say("x" * 10_000)
    assert (lost.value.reader_gone, lost.value.exit_code) == (False, 1)
