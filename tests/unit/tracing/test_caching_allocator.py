"""The model of torch's caching allocator: laws it keeps whatever is asked, and cases whose answer the rules of
c10/cuda/CUDACachingAllocator.cpp (torch 2.13) give; the rule's function is named. No GPU has confirmed any of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.tracing.caching_allocator import CachingAllocator, Event, replay
from support.soak import examples

MIB = 2**20
SETTINGS = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])
PAGE = {True: 2 * MIB, False: 20 * MIB}  # of a small and of a large request

sizes = st.one_of(
    st.integers(1, 2 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 10 * MIB + 1, 20 * MIB]),
    st.integers(1, 200).map(lambda count: count * 512 * 1024),
)


@st.composite
def histories(draw: st.DrawFn, size: st.SearchStrategy[int] = sizes) -> list[Event]:
    """Storages that come and go in any order."""
    events: list[Event] = []
    live: list[int] = []
    for key in range(draw(st.integers(1, 40))):
        events.append((key, draw(size)))
        live.append(key)
        for _ in range(draw(st.integers(0, min(2, len(live))))):
            events.append((live.pop(draw(st.integers(0, len(live) - 1))), 0))
    return events


def live_bytes(events: list[Event]) -> Iterator[int]:
    """After each event, what is alive, rounded as the allocator rounds."""
    live: dict[int, int] = {}
    total = 0
    for key, size in events:
        rounded = -(-size // 512) * 512
        total += rounded - live.get(key, 0)
        live[key] = rounded
        yield total


@SETTINGS
@examples(10, 2000)
@given(events=histories())
def test_reserved_covers_allocated_covers_live(expandable: bool, events: list[Event]) -> None:
    replayed, most = replay(events, expandable), max(live_bytes(events))
    assert replayed.reserved_bytes >= replayed.allocated_bytes >= most
    assert 0 <= replayed.stuck_bytes <= replayed.idle_bytes <= replayed.reserved_bytes
    if expandable:
        assert replayed.allocated_bytes == most  # every remainder is cut off
    assert replayed == replay(events, expandable)


@SETTINGS
@examples(10, 2000)
@given(events=histories())
def test_blocks_in_use_never_overlap_and_once_freed_all_can_be_given_back(
    expandable: bool, events: list[Event]
) -> None:
    allocator = CachingAllocator(expandable)
    live = {}
    for key, size in events:
        if size:
            live[key] = allocator.allocate(size)
            assert live[key].size >= size
        else:
            allocator.free(live.pop(key))
        spans = sorted((block.address, block.address + block.size) for block in live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(end - start for start, end in spans) <= allocator.reserved_bytes
    for block in live.values():
        allocator.free(block)
    assert allocator.allocated_bytes == allocator.stuck_bytes == 0
    allocator.release_cached()
    assert allocator.reserved_bytes == 0


@examples(10, 2000)
@given(size=sizes, data=st.data())
def test_expandable_segments_waste_less_than_a_page_on_equal_sizes(size: int, data: st.DataObject) -> None:
    events = data.draw(histories(st.just(size)))
    waste = replay(events, expandable=True).reserved_bytes - max(live_bytes(events))
    assert waste < PAGE[-(-size // 512) * 512 <= MIB]


@examples(10, 2000)
@given(events=histories())
def test_an_expandable_pool_once_freed_is_one_piece(events: list[Event]) -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.allocate(size + MIB) for _, size in events if size]  # all of the large pool
    for block in blocks:
        allocator.free(block)
    reserved = allocator.reserved_bytes
    allocator.allocate(reserved)
    assert allocator.reserved_bytes == reserved


@SETTINGS
@examples(10, 2000)
@given(events=histories(), device_bytes=st.integers(1, 400).map(lambda count: count * MIB))
def test_a_device_is_never_overdrawn(expandable: bool, events: list[Event], device_bytes: int) -> None:
    without_end = replay(events, expandable)
    replayed = replay(events, expandable, device_bytes)
    assert replayed.reserved_bytes <= device_bytes
    # The addresses of an expandable segment end at 9/8 of its device. What can grow up to there is cut last as long as
    # it has the most room, which it has for certain while as much again is left.
    needed = without_end.reserved_bytes * (2 if expandable else 1)
    if needed <= device_bytes:
        assert replayed == without_end
    if max(live_bytes(events)) > device_bytes:
        assert replayed.ran_out
    if replayed.ran_out:
        assert replayed.retries > 0


def storages(*mebibytes: float) -> list[Event]:
    """Storages made one after the other; a size that is negative lets go of the first of that size."""
    events: list[Event] = []
    for key, size in enumerate(mebibytes):
        if size > 0:
            events.append((key, int(size * MIB)))
        else:
            events.append((next(first for first, size_bytes in events if size_bytes == -size * MIB), 0))
    return events


BYTE, BLOCK = 1 / MIB, 512 / MIB


@pytest.mark.parametrize(
    ("events", "default", "expandable"),
    [
        # get_pool, get_allocation_size; ExpandableSegment maps whole pages of 2 or 20 MiB
        ((BYTE,), 2, 2),
        ((1,), 2, 2),
        ((1 + BYTE,), 20, 20),
        ((10 - BLOCK,), 20, 20),
        ((10,), 10, 20),
        ((10 + BYTE,), 12, 20),
        ((21,), 22, 40),
        # small requests share a segment, large ones another
        ((1, 1), 2, 2),
        ((1, 1, BYTE), 4, 4),
        ((5, 5, 5, 5), 20, 20),
        ((5, BYTE), 22, 22),
        # BlockComparatorSize, get_free_block: the smallest block that fits is taken
        ((30, 20, -30, -20, 20, 30), 50, None),
        ((30, 20, -30, -20, 21, 30), 80, None),
        # try_merge_blocks: neighbours are of one segment; the pages of one do merge
        ((20, 20.5, -20, -20.5, 30), 72, 60),
        # find_expandable_block starts at the free block before the unmapped one
        ((12, 25), None, 40),
    ],
    ids=str,
)
def test_what_requests_take_from_the_device(
    events: tuple[float, ...], default: int | None, expandable: int | None
) -> None:
    for setting, mebibytes in ((False, default), (True, expandable)):
        if mebibytes is not None:
            assert replay(storages(*events), setting).reserved_bytes == mebibytes * MIB


def test_a_remainder_of_a_large_block_up_to_a_mebibyte_is_not_cut_off() -> None:
    """should_split: more than kSmallSize must remain; with expandable segments, kMinBlockSize."""
    for request, expandable, taken in ((11, False, 12), (11 - BLOCK, False, 11 - BLOCK), (11, True, 11)):
        assert replay(storages(request), expandable).allocated_bytes == taken * MIB


def test_a_hole_is_preferred_to_the_end_that_can_grow() -> None:
    """get_free_block compares what blocks can expand to."""
    allocator = CachingAllocator(expandable=True)
    _, hole, _ = (allocator.allocate(size * MIB) for size in (4, 8, 4))
    allocator.free(hole)
    assert allocator.allocate(3 * MIB).address == 4 * MIB  # the end, of 4 MiB, would fit better


def test_a_full_device_gets_whole_free_segments_back_once() -> None:
    """release_cached_blocks, and num_alloc_retries of the second alloc_block."""
    for requests, ran_out in (((20, 21, -20, -21, 30), False), ((20, 21, -20, 40), True)):
        replayed = replay(storages(*requests), device_bytes=50 * MIB)
        assert (replayed.reserved_bytes, replayed.retries, replayed.ran_out) == (42 * MIB, 1, ran_out)


def test_a_full_device_gets_whole_free_pages_back() -> None:
    """release_blocks unmaps the pages within a free block; the next request that fits is mapped at the lowest gap."""
    allocator = CachingAllocator(expandable=True, device_bytes=100 * MIB)
    first, _ = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    assert allocator.allocate(50 * MIB).address == 60 * MIB  # too long for the gap
    assert (allocator.retries, allocator.reserved_bytes) == (1, 80 * MIB)
    assert allocator.allocate(20 * MIB).address == 0
    assert allocator.reserved_bytes == 100 * MIB


def test_what_lies_between_storages_in_use_is_stuck() -> None:
    """Every other 2 MiB storage is let go of: nothing larger fits, and no page is free."""
    keys = range(100)
    events = [*((key, 2 * MIB) for key in keys), *((key, 0) for key in keys if key % 2 == 0), (1000, 21 * MIB)]
    for expandable, grown in ((False, 22 * MIB), (True, 40 * MIB)):
        replayed = replay(events, expandable)
        assert replayed.reserved_bytes == 200 * MIB + grown
        assert replayed.stuck_bytes >= 100 * MIB
        assert replayed.idle_bytes - replayed.stuck_bytes < 20 * MIB


def test_sizes_that_grow_a_little_each_step_waste_segments_of_their_own() -> None:
    """Note [Expandable Segments]: what the setting is for."""
    steps = [
        [*((key, (20 + 2 * step) * MIB) for key in range(10)), *((key, 0) for key in range(10))] for step in range(10)
    ]
    events = [event for step in steps for event in step]
    live = 10 * 38 * MIB
    assert replay(events, expandable=True).reserved_bytes - live < 20 * MIB
    assert replay(events).reserved_bytes == sum(10 * (20 + 2 * step) * MIB for step in range(10))
