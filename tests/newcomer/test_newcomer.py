"""What a newcomer sees from an empty folder to a trusted run, typed into a real terminal: every screen fits, none is
cut, and every one names the next step. The screens are kept under tests/golden/newcomer/.

UPDATE_GOLDEN=1 writes them anew; look at the difference before committing it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from session import STEPS, Screen, Step, newcomer

pytestmark = pytest.mark.frameworks

SCREENS = Path(__file__).resolve().parents[1] / "golden" / "newcomer"
NARROW, WIDE = (80, 24), (120, 40)
TABLES = ("check", "plan", "runs", "report", "accuracy")  # of which a wide terminal shows more
NUMBERS = {step.name: f"{number:02}" for number, step in enumerate(STEPS, 1)}


Taken = dict[tuple[str, tuple[int, int]], Screen]
TAKEN = [(step, size) for step in STEPS for size in (NARROW, WIDE) if size == NARROW or step.name in TABLES]


@pytest.fixture(scope="module")
def screens() -> Taken:
    """The screens of one session by name and size."""
    with newcomer() as session:
        return {(step.name, size): session.take(step, *size) for step, size in TAKEN}


@pytest.fixture(params=TAKEN, ids=lambda taken: f"{taken[0].name}-{taken[1][0]}x{taken[1][1]}")
def taken(request: pytest.FixtureRequest) -> tuple[Step, tuple[int, int]]:
    return request.param


@pytest.fixture
def step(taken: tuple[Step, tuple[int, int]]) -> Step:
    return taken[0]


@pytest.fixture
def screen(screens: Taken, taken: tuple[Step, tuple[int, int]]) -> Screen:
    return screens[taken[0].name, taken[1]]


def test_it_ends_with_the_expected_code(step: Step, screen: Screen) -> None:
    assert screen.code == step.code, screen.text
    assert "Traceback" not in screen.text


def test_it_names_the_next_step(step: Step, screen: Screen) -> None:
    """On the screen itself, so where much was written at the end of it."""
    visible = " ".join(" ".join(screen.lines).split())
    assert [name for name in step.names if name not in visible] == [], screen.text


def test_it_fits_the_screen(step: Step, screen: Screen) -> None:
    """What was typed still stands above the answer, unless there is more to say than a screen holds."""
    assert step.long or screen.lines[0] == f"$ {step.line}"[: screen.columns], screen.text


def test_no_line_is_cut_or_broken_by_the_terminal(step: Step, screen: Screen) -> None:
    """Only commands may be longer than the screen is wide: they are copied."""
    wide = [line for line in screen.text.splitlines()[1:] if len(line) > screen.columns and not is_command(line)]
    assert step.long or wide == [], "\n".join(wide)
    assert "…" not in screen.text


def test_it_matches_the_golden_screen(step: Step, screen: Screen) -> None:
    path = SCREENS / f"{screen.columns}x{screen.rows}" / f"{NUMBERS[step.name]}-{step.name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(screen.text, "utf-8")
    if not step.varies:
        assert wording(screen.text) == wording(path.read_text("utf-8"))


def test_every_golden_screen_belongs_to_a_step() -> None:
    names = {f"{columns}x{rows}/{NUMBERS[step.name]}-{step.name}.txt" for step, (columns, rows) in TAKEN}
    assert {str(path.relative_to(SCREENS)) for path in SCREENS.rglob("*.txt")} == names


def is_command(line: str) -> bool:
    return re.match(r"(Next: |      )llmlaunch ", line) is not None


def wording(text: str) -> str:
    """A screen without what differs from run to run: numbers, names of runs and jobs, times, bars, and the spaces and
    line breaks that long names move. What the numbers are is for other tests to say."""
    text = re.sub(r"quickstart-\d{8}-?T?\d{6}Z?-[0-9a-f]{4}", "RUN", text)
    text = re.sub(r"[█▓░▏│─]+", "BAR", text)
    text = re.sub(r"[-+]?\d[\d,.]*(e-?\d+)?", "#", text)
    text = re.sub(r"# (s|ms|min|h|days?)( # (s|min|h))?\b", "TIME", text)
    return " ".join(text.split())
