"""The judge of the pace: a slow device is named in time, and no healthy one ever, however much it differs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.node.pace import LATE_WINDOWS, READS_A_MINUTE, GpuWindow, PaceJudge, windows_of
from llmlaunch.node.window_clock import WINDOW_SECONDS
from llmlaunch.rundir.slow_devices import SlowDevice, slow_devices

WINDOWS_A_DAY = int(24 * 3600 / WINDOW_SECONDS)
IN_5_MINUTES, IN_20_MINUTES = 5 * 60, 20 * 60
# From a window's end until it is judged: the line is seen late, and then every node has its turn.
SEEN_LATE_SECONDS = LATE_WINDOWS * WINDOW_SECONDS
TURN_SECONDS = 2000 * 60 / READS_A_MINUTE
SICK = ("n0", 3)
PER_NODE = 8

Change = Callable[[GpuWindow], GpuWindow]


def fleet(seed: int, nodes: int, spread: float = 0.10, jitter: float = 0.01) -> Iterator[list[GpuWindow]]:
    """Windows of healthy GPUs: their silicon differs by `spread`, their rooms by 25 °C; the power limit holds them."""
    random_ = random.Random(seed)
    silicon = {(n, d): random_.uniform(1 - spread / 2, 1 + spread / 2) for n in range(nodes) for d in range(PER_NODE)}
    ambient = [random_.uniform(20, 45) for _ in range(nodes)]
    capped = random_.random()
    while True:
        yield [
            GpuWindow(
                f"n{node}",
                device,
                f"GPU-{node}-{device}",
                "H100",
                1700 * quality * random_.gauss(1, jitter),
                watts=690 + random_.uniform(-8, 8),
                celsius=ambient[node] + random_.uniform(28, 40),
                reasons={"power_cap": capped},
            )
            for (node, device), quality in silicon.items()
        ]


def slowed(window: GpuWindow, factor: float, **changes: Any) -> GpuWindow:
    """As heat does it: clock and power fall."""
    watts = (window.watts or 0.0) / factor
    return window._replace(clock_mhz=window.clock_mhz / factor, watts=watts, **changes)


def named(windows: Iterator[list[GpuWindow]], limit: float) -> SlowDevice:
    """Feed windows, the first of them but half slow, until a device is named; fail after `limit` seconds."""
    judge = PaceJudge()
    for number in range(int((limit - SEEN_LATE_SECONDS - TURN_SECONDS) / WINDOW_SECONDS)):
        fresh, _ = judge.add(next(windows), 1e9 + number * WINDOW_SECONDS)
        if fresh:
            assert judge.slow == fresh
            return fresh[0] if len(fresh) == 1 else pytest.fail(f"{len(fresh)} are named")
    return pytest.fail(f"nobody was named in {limit:.0f} s")


def sick_fleet(seed: int, nodes: int, factor: float, **changes: Any) -> Iterator[list[GpuWindow]]:
    # of the window in which it begins only half is slow
    for number, windows in enumerate(fleet(seed, nodes, spread=0.04)):
        now = 2 * factor / (factor + 1) if number == 0 else factor
        yield [slowed(w, now, **changes) if (w.node, w.device) == SICK else w for w in windows]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 12), factor=st.floats(2.0, 6.0))
def test_a_gpu_at_half_speed_is_named_within_five_minutes(seed: int, nodes: int, factor: float) -> None:
    device = named(sick_fleet(seed, nodes, factor, reasons={"hw_thermal": 1.0}), IN_5_MINUTES)
    assert (device.node, device.device, device.uuid) == (*SICK, "GPU-0-3")
    assert device.factor == pytest.approx(factor, rel=0.1)
    assert "hardware thermal slowdown" in device.signs


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 12))
def test_a_gpu_1_2_times_slower_is_named_within_twenty_minutes(seed: int, nodes: int) -> None:
    device = named(sick_fleet(seed, nodes, 1.22), IN_20_MINUTES)
    assert (device.node, device.device) == SICK


def test_the_signs_are_said_beside_the_clock() -> None:
    hot = {"reasons": {"sw_thermal": 0.9}, "celsius": 91.0, "corrected_ecc": 5000, "remapped_rows": 2}
    signs = named(sick_fleet(1, 4, 2.0, **hot), IN_5_MINUTES).signs
    assert len(signs) == 5
    for words in ("SM clock 8", "software thermal", "91 °C, its peers", "5000 corrected ECC", "2 rows of memory"):
        assert any(words in sign for sign in signs), words


def test_a_lower_power_limit_than_the_others_have_is_a_fault() -> None:
    signs = named(sick_fleet(2, 4, 1.5, reasons={"power_cap": 1.0}), IN_20_MINUTES).signs
    assert any("held at 46" in sign and "its peers draw 69" in sign for sign in signs)


def healthy(windows: Iterator[list[GpuWindow]], count: int = WINDOWS_A_DAY) -> None:
    judge = PaceJudge()
    for number in range(count):
        judge.add(next(windows), 1e9 + number * WINDOW_SECONDS)
        assert judge.slow == []


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 3))
def test_healthy_gpus_are_never_named_in_a_day(seed: int, nodes: int) -> None:
    healthy(fleet(seed, nodes))


def uneven_work(seed: int, nodes: int) -> Iterator[list[GpuWindow]]:
    """A fuller last stage: its GPUs are at the power limit while the others wait for them at full clock, draw less, and
    one popular expert among them changes place every quarter of an hour. Evaluations and saves leave most idle."""
    for number, windows in enumerate(fleet(seed, nodes)):
        popular, saving = number // 30 % PER_NODE, number % 60 < 5
        works = [w.node == f"n{nodes - 1}" or w.device == popular for w in windows]
        uneven = [
            w._replace(clock_mhz=w.clock_mhz * 0.8, watts=698.0, reasons={"power_cap": 1.0})
            if busy
            else w._replace(clock_mhz=1980.0, watts=480.0, reasons={})
            for w, busy in zip(windows, works, strict=True)
        ]
        yield [w for w in uneven if not saving or w.device == 0]


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 4))
def test_a_gpu_with_more_work_is_not_slow(seed: int, nodes: int) -> None:
    healthy(uneven_work(seed, nodes))


def test_gpus_of_other_models_are_no_peers() -> None:
    mixed = ([w._replace(group="H200", clock_mhz=900.0) if w.device < 4 else w for w in ws] for ws in fleet(3, 1))
    healthy(mixed, 100)


def test_of_two_gpus_nobody_can_say_which_is_slow() -> None:
    healthy(([slowed(ws[0], 2.0), ws[1]] for ws in fleet(4, 1)), 100)


def test_where_half_of_them_are_slow_nobody_is_named() -> None:
    healthy(([slowed(w, 1.5) if w.device % 2 else w for w in ws] for ws in fleet(5, 4)), 100)


def test_a_device_that_recovers_is_told_once_and_can_be_named_again() -> None:
    judge, said = PaceJudge(), []
    for number, windows in zip(range(120), fleet(6, 2), strict=False):
        sick = number < 30 or number >= 90
        now = [slowed(w, 2.0) if sick and (w.node, w.device) == SICK else w for w in windows]
        fresh, recovered = judge.add(now, 1e9 + number * WINDOW_SECONDS)
        said += [f"slow {device.since - 1e9:.0f}" for device in fresh] + ["well" for _ in recovered]
    assert said == ["slow 0", "well", f"slow {90 * WINDOW_SECONDS:.0f}"]


def test_a_damaged_line_counts_as_absent() -> None:
    entry = {"index": 0, "uuid": "GPU-0", "name": "H100", "samples": 9, "clock_mhz": 1980.0, "reasons": {"x": "y"}}
    wrong: list[Any] = [None, 3, {}, {**entry, "clock_mhz": "fast"}, {**entry, "index": None}, {**entry, "samples": 1}]
    (window,) = windows_of({"devices": [*wrong, entry]}, "n1")
    assert (window.node, window.clock_mhz) == ("n1", 1980.0)
    assert windows_of({"devices": 4}, "n1") == []


def test_what_is_written_is_read_back_and_nothing_else() -> None:
    device = SlowDevice("n1", 3, "GPU-3", 2.0, 1_000_000_000, ("SM clock 990 MHz, its peers 1980",))
    assert slow_devices({"slow": [device.as_json(), {"node": "../n"}, "n2", {**device.as_json(), "device": None}]}) == [
        device
    ]
    assert device.sentence() == "GPU 3 of n1 is 2.0 times slower than its peers (SM clock 990 MHz, its peers 1980)"
    (hostile,) = slow_devices({"slow": [{**device.as_json(), "factor": 1e99, "signs": ["\x1b[2Ja\nb" * 99, 4] * 99}]})
    assert "\x1b" not in hostile.sentence()
    assert len(hostile.sentence()) < 2500
