"""When a step is overdue, by a clock the test turns."""

from __future__ import annotations

import pytest

from llmlaunch.node.step_tracker import StepTracker
from llmlaunch.rundir.step_lines import Step, StepNews

FLOOR, FIRST, SAVING = 600.0, 3600.0, 1800.0


class Job:
    """A training whose log is told to a StepTracker, second by second."""

    def __init__(self, **progress: object) -> None:
        told = {"floor_seconds": FLOOR, "first_step_seconds": FIRST, "promised": True, "steps": 1000, **progress}
        self.now = 0.0
        self.pace = StepTracker(told, self.now)
        self.step = 0

    def steps(self, count: int, seconds: float) -> Job:
        for _ in range(count):
            self.step += 1
            self.now += seconds
            self.pace.update(StepNews([Step(self.step, 1000, 3.0, None, None)], slow=False), self.now)
        return self

    def slow(self, after: float = 0.0) -> Job:
        self.now += after
        self.pace.update(StepNews([], slow=True), self.now)
        return self

    def hung_after(self, saving: bool = False) -> tuple[str, float]:
        """What is waited for and for how long, and that exactly then it is overdue."""
        allowed = self.pace.limit(saving)
        assert allowed is not None
        assert self.pace.overdue(self.now + allowed.seconds, saving) is None
        hung = self.pace.overdue(self.now + allowed.seconds + 1.0, saving)
        assert hung == {
            "since_seconds": allowed.seconds + 1.0,
            "allowed_seconds": allowed.seconds,
            "what": allowed.what,
        }
        return allowed.what, allowed.seconds


def test_the_first_step_has_its_own_time() -> None:
    assert Job().hung_after() == ("first step", FIRST)


def test_until_a_gap_is_known_the_second_has_it_too() -> None:
    assert Job().steps(1, 500.0).hung_after() == ("a step", FIRST)


def test_short_steps_have_the_floor() -> None:
    assert Job().steps(20, 1.0).hung_after() == ("a step", FLOOR)


def test_long_steps_have_ten_of_them() -> None:
    assert Job().steps(20, 90.0).hung_after() == ("a step", 900.0)


def test_the_median_is_of_the_last_fifty() -> None:
    assert Job().steps(60, 90.0).steps(50, 61.0).hung_after() == ("a step", 610.0)


def test_a_gap_that_was_no_hang_may_come_again() -> None:
    """An evaluation that the log does not announce."""
    assert Job().steps(20, 1.0).steps(1, 580.0).steps(20, 1.0).hung_after() == ("a step", 1160.0)


def test_a_save_has_its_own_time_and_starts_the_clock_anew() -> None:
    assert Job().steps(20, 1.0).slow(after=300.0).hung_after() == ("saving", SAVING)
    assert Job(saving_seconds=5000.0).steps(20, 1.0).slow().hung_after() == ("saving", 5000.0)


def test_a_save_is_over_with_the_next_step_and_its_length_is_learnt() -> None:
    job = Job().steps(20, 1.0).slow().steps(1, 400.0)
    assert job.steps(2, 1.0).hung_after() == ("a step", FLOOR)
    assert job.slow().hung_after() == ("saving", 4000.0)


@pytest.mark.parametrize(("stride", "before_saves", "others"), [(1, (50, 100), (49, 51)), (20, (40, 100), (20, 60))])
def test_a_script_that_does_not_say_so_saves_when_the_recipe_does(
    stride: int, before_saves: tuple[int, ...], others: tuple[int, ...]
) -> None:
    """Every 50 steps, and a line every `stride`: after step 40 comes the save of step 50, then the line of step 60."""
    job = Job(promised=False, save_every=50)
    for step in range(stride, 121, stride):
        job.now += 1.0
        job.pace.update(StepNews([Step(step, 1000, None, None, None)], slow=False), job.now)
        allowed = job.pace.limit()
        assert step not in before_saves or allowed is None or allowed.what == "saving"
        assert step not in others or allowed is None or allowed.what == "a step"


def test_told_to_save_and_after_the_last_step_it_is_saving() -> None:
    assert Job().steps(20, 1.0).hung_after(saving=True) == ("saving", SAVING)
    assert Job(steps=20).steps(20, 1.0).pace.limit() == ("a step", FLOOR)  # the log's own total counts
    last = Job()
    last.step = 980
    assert last.steps(20, 1.0).hung_after() == ("saving", SAVING)


def test_the_same_step_said_again_is_no_news() -> None:
    job = Job().steps(20, 1.0)
    assert not job.pace.update(StepNews([Step(20, 1000, 2.5, 77.0, None)], slow=False), job.now + 590.0)
    assert job.pace.overdue(job.now + FLOOR + 1.0) is not None
    assert job.pace.record()["loss"] == 2.5


def test_lines_without_a_number_are_news_each() -> None:
    pace = StepTracker({"floor_seconds": FLOOR, "first_step_seconds": FIRST, "promised": True}, 0.0)
    for second in range(1, 10):
        assert pace.update(StepNews([Step(None, None, 2.0, None, None)], slow=False), float(second))
    assert pace.overdue(9.0 + FLOOR) is None
    assert pace.overdue(10.0 + FLOOR) is not None
    assert pace.record()["step"] is None


def test_a_script_that_promised_nothing_is_judged_when_its_steps_are_sure() -> None:
    job = Job(promised=False)
    assert job.pace.limit() is None
    assert job.steps(3, 1.0).pace.limit() is None  # two gaps
    assert job.steps(1, 1.0).hung_after() == ("a step", FLOOR)


def test_lines_that_come_in_bursts_are_one_gap_each() -> None:
    """A script that does not flush: eighty lines every thousand seconds."""
    job = Job(promised=False)
    for burst in range(1, 6):
        lines = [Step(80 * burst + n, 1000, None, None, None) for n in range(80)]
        job.now += 1000.0
        job.pace.update(StepNews(lines, slow=False), job.now)
    assert job.hung_after() == ("a step", 10_000.0)
    assert job.pace.record()["step_seconds"] == 12.5


def test_switched_off_nothing_is_overdue_and_progress_is_known() -> None:
    job = Job(floor_seconds=None, first_step_seconds=None).steps(20, 1.0)
    assert job.pace.overdue(1e9) is None
    assert job.pace.record()["step"] == 20


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (Step(1, 10, 3.0, 1969.0, 0.5), (1969.0, 0.5)),
        (Step(1, 10, 3.0, None, 0.5), (8192.0, 0.5)),
        (Step(1, 10, 3.0, None, None), (None, None)),
    ],
)
def test_tokens_a_second_are_the_lines_own_or_the_recipes(line: Step, expected: tuple[float, float]) -> None:
    pace = StepTracker({"promised": True, "tokens_per_step": 4096}, 0.0)
    pace.update(StepNews([line], slow=False), 4.0)
    record = pace.record()
    assert (record["tokens_per_second"], record["step_seconds"]) == expected
