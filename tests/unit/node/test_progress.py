"""When a step is overdue, and what is known of the progress, by a clock of the test."""

from __future__ import annotations

import pytest

from llmlaunch.node.progress import StepTracker
from llmlaunch.rundir.step_lines import Step, StepNews

ATTEMPT = "17.0"


FLOOR, FIRST, SAVING = 600.0, 3600.0, 1800.0


class Job:
    """A training whose log is given to a StepTracker, second by second."""

    def __init__(self, **options: object) -> None:
        progress = {"floor_seconds": FLOOR, "first_step_seconds": FIRST, "promised": True, "steps": 1000, **options}
        self.now = 0.0
        self.tracker = StepTracker(progress, self.now)
        self.step = 0

    def steps(self, count: int, seconds: float) -> Job:
        for _ in range(count):
            self.step += 1
            self.now += seconds
            self.tracker.update(StepNews([Step(self.step, 1000, 3.0, None, None)], slow=False), self.now)
        return self

    def slow(self, after: float = 0.0) -> Job:
        self.now += after
        self.tracker.update(StepNews([], slow=True), self.now)
        return self

    def hung_after(self, saving: bool = False) -> tuple[str, float]:
        """What is waited for and for how long, and that exactly then it is overdue."""
        limit = self.tracker.limit(saving)
        assert limit is not None
        assert self.tracker.overdue(self.now + limit.seconds, saving) is None
        hung = self.tracker.overdue(self.now + limit.seconds + 1.0, saving)
        assert hung == {"since_seconds": limit.seconds + 1.0, "allowed_seconds": limit.seconds, "what": limit.what}
        return limit.what, limit.seconds


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param(Job(), ("first step", FIRST), id="the first step has its own time"),
        pytest.param(Job().steps(1, 500.0), ("a step", FIRST), id="the second has it too: no gap is known"),
        pytest.param(Job().steps(20, 1.0), ("a step", FLOOR), id="short steps have the floor"),
        pytest.param(Job().steps(20, 90.0), ("a step", 900.0), id="long steps have ten of them"),
        pytest.param(Job().steps(60, 90.0).steps(50, 61.0), ("a step", 610.0), id="the median is of the last fifty"),
        # an evaluation that the log does not announce
        pytest.param(
            Job().steps(20, 1.0).steps(1, 580.0).steps(20, 1.0), ("a step", 1160.0), id="a gap that was no hang"
        ),
        pytest.param(Job().steps(20, 1.0).slow(after=300.0), ("saving", SAVING), id="a save starts the clock anew"),
        pytest.param(Job(saving_seconds=5000.0).steps(20, 1.0).slow(), ("saving", 5000.0), id="a save's own time"),
    ],
)
def test_how_long_the_next_sign_may_take(job: Job, expected: tuple[str, float]) -> None:
    assert job.hung_after() == expected


def test_a_save_is_over_with_the_next_step_and_its_length_is_learnt() -> None:
    job = Job().steps(20, 1.0).slow().steps(1, 400.0)
    assert job.steps(2, 1.0).hung_after() == ("a step", FLOOR)
    assert job.slow().hung_after() == ("saving", 4000.0)


@pytest.mark.parametrize("key", ["save_every", "evaluate_every"])
@pytest.mark.parametrize(("stride", "before_saves", "others"), [(1, (50, 100), (49, 51)), (20, (40, 100), (20, 60))])
def test_a_script_that_does_not_say_so_saves_and_evaluates_when_the_recipe_does(
    key: str, stride: int, before_saves: tuple[int, ...], others: tuple[int, ...]
) -> None:
    """Every 50 steps, and a line every `stride`: after step 40 comes the save of step 50, then the line of step 60."""
    job = Job(promised=False, **{key: 50})
    for step in range(stride, 121, stride):
        job.now += 1.0
        job.tracker.update(StepNews([Step(step, 1000, None, None, None)], slow=False), job.now)
        limit = job.tracker.limit()
        assert step not in before_saves or limit is None or limit.what == "saving"
        assert step not in others or limit is None or limit.what == "a step"


def test_told_to_save_and_after_the_last_step_it_is_saving() -> None:
    assert Job().steps(20, 1.0).hung_after(saving=True) == ("saving", SAVING)
    assert Job(steps=20).steps(20, 1.0).tracker.limit() == ("a step", FLOOR)  # the log's own total counts
    last = Job()
    last.step = 980
    assert last.steps(20, 1.0).hung_after() == ("saving", SAVING)


def test_the_same_step_logged_again_is_no_news() -> None:
    job = Job().steps(20, 1.0)
    assert not job.tracker.update(StepNews([Step(20, 1000, 2.5, 77.0, None)], slow=False), job.now + 590.0)
    assert job.tracker.overdue(job.now + FLOOR + 1.0) is not None
    assert job.tracker.record()["loss"] == 2.5


def test_lines_without_a_number_are_news_each() -> None:
    tracker = StepTracker({"floor_seconds": FLOOR, "first_step_seconds": FIRST, "promised": True}, 0.0)
    for second in range(1, 10):
        assert tracker.update(StepNews([Step(None, None, 2.0, None, None)], slow=False), float(second))
    assert tracker.overdue(9.0 + FLOOR) is None
    assert tracker.overdue(10.0 + FLOOR) is not None
    assert tracker.record()["step"] is None


def test_a_script_that_promised_nothing_is_judged_when_its_steps_are_sure() -> None:
    job = Job(promised=False)
    assert job.tracker.limit() is None
    assert job.steps(3, 1.0).tracker.limit() is None  # two gaps
    assert job.steps(1, 1.0).hung_after() == ("a step", FLOOR)


def test_lines_that_come_in_bursts_are_one_gap_each() -> None:
    """A script that does not flush: eighty lines every thousand seconds."""
    job = Job(promised=False)
    for burst in range(1, 6):
        lines = [Step(80 * burst + n, 1000, None, None, None) for n in range(80)]
        job.now += 1000.0
        job.tracker.update(StepNews(lines, slow=False), job.now)
    assert job.hung_after() == ("a step", 10_000.0)
    assert job.tracker.record()["step_seconds"] == 12.5


def test_switched_off_nothing_is_overdue_and_progress_is_known() -> None:
    job = Job(floor_seconds=None, first_step_seconds=None).steps(20, 1.0)
    assert job.tracker.overdue(1e9) is None
    assert job.tracker.record()["step"] == 20


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (Step(1, 10, 3.0, 1969.0, 0.5), (1969.0, 0.5)),
        (Step(1, 10, 3.0, None, 0.5), (8192.0, 0.5)),
        (Step(1, 10, 3.0, None, None), (None, None)),
    ],
)
def test_tokens_a_second_are_the_lines_own_or_the_recipes(line: Step, expected: tuple[float, float]) -> None:
    tracker = StepTracker({"promised": True, "tokens_per_step": 4096}, 0.0)
    tracker.update(StepNews([line], slow=False), 4.0)
    record = tracker.record()
    assert (record["tokens_per_second"], record["step_seconds"]) == expected
