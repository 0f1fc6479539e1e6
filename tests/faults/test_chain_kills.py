"""What belongs to a run is killed in its midst: every peak that was written before is in the store, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from random import Random

import pytest

from support.chain import Chain
from support.node_rig import GIB

pytestmark = pytest.mark.faults

Make = Callable[..., Chain]

KILLED = {
    "trainer": ("trainer 1",),
    "wrapper": ("wrapper 0",),
    "monitor": ("monitor",),
    "monitor and trainer": ("monitor", "trainer 0"),
    "torchrun": ("torchrun",),
    "script of the node": ("train.sh",),
    "job": ("job",),
    "everything": ("job", "train.sh", "monitor", "watchdog", "torchrun", "wrapper 0", "wrapper 1", "trainer 0"),
}
RANDOM_RUNS = 2
MOST_GIB = 70.0
LONGEST_SECONDS = 5.0  # torchrun and the ranks have begun by then, mostly


def kills(*roles: str) -> Callable[[Make, int], None]:
    def story(make: Make, repeat: int) -> None:
        run = make().start().train(40)
        before = run.kill(*roles)
        run.stop()
        records = {record["global_rank"]: record for record in run.judged(before) if record["peak_kind"] == "device"}
        assert [records[rank]["peak_bytes"] for rank in (0, 1)] == [40 * GIB, 41 * GIB]

    return story


def any_process_at_any_moment(which: int, make: Make, repeat: int) -> None:
    """One, two or three of them; and now and then the run is collected in between."""
    chance = Random(repeat * RANDOM_RUNS + which)
    run = make().start()
    faults, killed = [], []
    for _ in range(chance.randint(1, 3)):
        train_on(run, chance, chance.uniform(0, LONGEST_SECONDS))
        role = chance.choice(run.roles() or ["job"])
        faults.append(run.kill(role))
        killed.append(role)
        if chance.random() < 0.3:
            run.records()
    run.stop()
    print("killed", *killed)  # told where it fails
    run.judged(*faults)


def train_on(run: Chain, chance: Random, seconds: float) -> None:
    """The memory of every rank rises for so long, by steps of any size."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        now = run.driver.gpus[0].used_gib
        pids = {rank: record["program_pid"] for rank, record in run.ranks().items() if record["program_pid"]}
        run.driver.hold(min(MOST_GIB, now + chance.uniform(0, 5)), pids)
        time.sleep(chance.uniform(0, 0.3))


STORIES = {
    **{name: kills(*roles) for name, roles in KILLED.items()},
    **{f"any {which}": partial(any_process_at_any_moment, which) for which in range(RANDOM_RUNS)},
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_kill(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: object, repeat: int) -> None:
    stories[request.node.nodeid].result()
