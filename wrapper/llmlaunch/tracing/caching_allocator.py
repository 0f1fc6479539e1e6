"""What torch's CUDA caching allocator would take from a device for a run of allocations and frees.

A model of the native allocator of c10/cuda/CUDACachingAllocator.cpp (torch 2.13; its constants are in
c10/core/AllocatorConfig.h), with its default settings or with `expandable_segments:True`. Without that
setting it is 1.5 % off 20 peaks that B200s reserved (docs/tracing.md); with it, it is UNVALIDATED: nobody has held it
against a GPU yet. What it leaves out:

- Several streams. A block is cut from and merged with blocks of its own stream alone, and a block that another stream
  used too is reused only after that stream's work. The real allocator therefore reserves at least a pool's last segment
  more for each further stream that allocates, and whatever waits for other streams.
- `max_split_size_mb`, `garbage_collection_threshold` and `roundup_power2_divisions`, which are off unless set, private
  pools (CUDA graphs), and other processes on the device.
- Addresses of segments, which decide between free blocks of one size: here the oldest segment lies lowest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
BLOCK_BYTES = 512  # kMinBlockSize: every request is a multiple of it
SMALL_REQUEST_BYTES = 1 * MIB  # kSmallSize: the largest of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment holds one request, as it is taken
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size()
ROUNDED_BYTES = 2 * MIB  # kRoundLarge
ADDRESS_SPACE_BYTES = 2**60  # of an expandable segment, where the device has no limit

Event = tuple[int, int]


class OutOfMemory(Exception):
    """The device is full, and giving back what is cached did not help."""


@dataclass(frozen=True)
class Replayed:
    """Bytes. `reserved_bytes` is the peak of what was taken from the device, and `allocated_bytes` that of what was
    handed out, as torch counts it: whole blocks, of which a request may leave up to 1 MiB unused. When the reserved
    bytes reached their peak, `idle_bytes` of them were not handed out; giving back the cache would not have freed
    `stuck_bytes` of these, which lie in segments (of expandable ones: pages) that are partly in use. `retries` counts
    how often the cache was given back because the device was full; `ran_out`: even that did not help, and the replay
    ended there."""

    reserved_bytes: int
    allocated_bytes: int
    idle_bytes: int
    stuck_bytes: int
    retries: int = 0
    ran_out: bool = False


class _Block:
    """A piece of a segment; `before` and `after` are its neighbours there. Neither free nor mapped: pages that are not
    there (yet)."""

    __slots__ = ("address", "after", "before", "free", "mapped", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.free, self.mapped = False, True
        self.before: _Block | None = None
        self.after: _Block | None = None

    def follow(self, before: _Block) -> None:
        """Lies behind `before` from now on."""
        self.before, self.after = before, before.after
        if before.after is not None:
            before.after.before = self
        before.after = self

    def leave(self) -> None:
        if self.before is not None:
            self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before

    @property
    def room(self) -> int:
        """Its own bytes and those of the pages it can grow into."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)


class _Pool:
    """Free blocks by size and then address, and of expandable segments, what is not mapped by address."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def put(self, block: _Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def take(self, block: _Block) -> None:
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def put_unmapped(self, block: _Block) -> None:
        block.mapped = False
        insort(self.unmapped, (block.address, block))

    def take_unmapped(self, block: _Block) -> None:
        block.mapped = True
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block that holds `size` (get_free_block). One that can grow counts with its room, so that
        it is the last to be cut."""
        place = bisect_left(self.free, (size,))
        if place == len(self.free):
            return None
        block = self.free[place][2]
        for _, _, larger in self.free[place + 1 :] if block.room > block.size else ():
            if larger.room >= block.room:
                break
            block = larger
        return block


class CachingAllocator:
    """One device of `device_bytes` for torch's use (None: without end)."""

    def __init__(self, expandable: bool = False, device_bytes: int | None = None) -> None:
        self.expandable = expandable
        self.device_bytes = device_bytes
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.retries = 0
        self._small, self._large = _Pool(SMALL_SEGMENT_BYTES), _Pool(LARGE_SEGMENT_BYTES)
        self._next_address = 0

    def allocate(self, requested: int) -> _Block:
        """A block of at least `requested` bytes (more than none).

        Raises:
            OutOfMemory: the device is full even without what is cached.
        """
        size = -(-requested // BLOCK_BYTES) * BLOCK_BYTES
        pool = self._pool(size)
        block = pool.best_fit(size) or self._fresh(pool, size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._fresh(pool, size)
            if block is None:
                raise OutOfMemory(f"{size} bytes beside {self.reserved_bytes} reserved ones")
        pool.take(block)
        self._cut(pool, block, size)
        self.allocated_bytes += block.size
        return block

    def free(self, block: _Block) -> None:
        """Merges with free neighbours, which lie in the same segment (try_merge_blocks)."""
        pool = self._pool(block.size)  # no block of the small pool is larger than its requests, each of the other is
        self.allocated_bytes -= block.size
        self._merge(pool, block)
        pool.put(block)

    def release_cached(self) -> None:
        """Gives back whole free segments, and of expandable ones whole free pages (release_cached_blocks)."""
        for pool in (self._large, self._small):
            for _, _, block in tuple(pool.free):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved_bytes -= block.size

    @property
    def stuck_bytes(self) -> int:
        """Free bytes that `release_cached` would not give back."""
        stuck = 0
        for pool in (self._small, self._large):
            for size, address, block in pool.free:
                if self.expandable:
                    start, end = _whole_pages(address, size, pool.page)
                    stuck += size - (end - start)
                elif block.before is not None or block.after is not None:
                    stuck += size
        return stuck

    def _pool(self, size: int) -> _Pool:
        return self._small if size <= SMALL_REQUEST_BYTES else self._large

    def _cut(self, pool: _Pool, block: _Block, size: int) -> None:
        """What a request leaves of a block is a block of its own where it is large enough (should_split)."""
        rest = block.size - size
        if rest < BLOCK_BYTES if pool is self._small or self.expandable else rest <= SMALL_REQUEST_BYTES:
            return
        remainder = _Block(block.address + size, rest)
        remainder.follow(block)
        block.size = size
        pool.put(remainder)

    def _merge(self, pool: _Pool, block: _Block) -> None:
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.take(before)
            block.address = before.address
            block.size += before.size
            before.leave()
        if after is not None and after.free:
            pool.take(after)
            block.size += after.size
            after.leave()

    def _fits(self, size: int) -> bool:
        return self.device_bytes is None or self.reserved_bytes + size <= self.device_bytes

    def _fresh(self, pool: _Pool, size: int) -> _Block | None:
        """A free block of at least `size` bytes, new from the device (alloc_block); None: the device is full."""
        if self.expandable:
            return self._grown(pool, size)
        segment = _segment_bytes(size)
        if not self._fits(segment):
            return None
        block = _Block(self._addresses(segment), segment)
        self.reserved_bytes += segment
        pool.put(block)
        return block

    def _addresses(self, size: int) -> int:
        """The lowest address that no segment has had yet; every one is a multiple of all page sizes."""
        address = self._next_address
        self._next_address += -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        return address

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """Pages are mapped where the lowest free addresses are that hold `size`, next to a free block if there is one
        (find_expandable_block, try_allocate_expandable_block)."""
        block = self._growing(pool, size)
        if not block.mapped and not self._map(pool, block, min(block.size, size)):
            return None
        while block.size < size:
            pages = block.after
            assert pages is not None
            if not self._map(pool, pages, min(size - block.size, pages.size)):
                return None
            block = pages  # it has swallowed the block before it
        return block

    def _growing(self, pool: _Pool, size: int) -> _Block:
        for _, block in pool.unmapped:
            first = block.before if block.before is not None and block.before.free else block
            if _room_from(first, size) >= size:
                return first
        space = ADDRESS_SPACE_BYTES if self.device_bytes is None else self.device_bytes + self.device_bytes // 8
        space = -(-space // pool.page) * pool.page
        segment = _Block(self._addresses(space), space)
        pool.put_unmapped(segment)
        return segment

    def _map(self, pool: _Pool, block: _Block, size: int) -> bool:
        """The first pages of an unmapped block that hold `size` become a free one, merged with its neighbours."""
        pages = -(-size // pool.page) * pool.page
        if not self._fits(pages):
            return False
        pool.take_unmapped(block)
        if pages < block.size:
            rest = _Block(block.address + pages, block.size - pages)
            rest.follow(block)
            block.size = pages
            pool.put_unmapped(rest)
        self._merge(pool, block)
        pool.put(block)
        self.reserved_bytes += pages
        return True

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Whole pages of a free block are given back; what lies before and behind them stays free."""
        start, end = _whole_pages(block.address, block.size, pool.page)
        if start == end:
            return
        pool.take(block)
        stop = block.address + block.size
        pages = block
        if block.address < start:
            pages = _Block(start, end - start)
            pages.follow(block)
            block.size = start - block.address
            pool.put(block)
        pages.size = end - start
        if end < stop:
            rest = _Block(end, stop - end)
            rest.follow(pages)
            pool.put(rest)
        self.reserved_bytes -= end - start
        for beside in (pages.before, pages.after):
            if beside is not None and not beside.mapped:
                pool.take_unmapped(beside)
                pages.address, pages.size = min(pages.address, beside.address), pages.size + beside.size
                beside.leave()
        pool.put_unmapped(pages)


def _room_from(block: _Block, enough: int) -> int:
    """Bytes of a block and of those behind it that are free or can be mapped; counting ends at `enough`."""
    room = 0
    at: _Block | None = block
    while at is not None and (at.free or not at.mapped) and room < enough:
        room, at = room + at.size, at.after
    return room


def _segment_bytes(size: int) -> int:
    """What is taken from the device for a request (get_allocation_size)."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUNDED_BYTES) * ROUNDED_BYTES


def _whole_pages(address: int, size: int, page: int) -> tuple[int, int]:
    """Where the pages start and end that lie within; the same where there is none."""
    start = -(-address // page) * page
    return start, max(start, (address + size) // page * page)


def replay(events: Iterable[Event], expandable: bool = False, device_bytes: int | None = None) -> Replayed:
    """What the allocator reserves for `events` in order: (key, bytes) where a storage is made, (key, 0) where it is let
    go of. A key may come again once it was let go of. `device_bytes` is what torch may take (None: without end)."""
    allocator = CachingAllocator(expandable, device_bytes)
    live: dict[int, _Block] = {}
    reserved = allocated = idle = stuck = 0
    ran_out = False
    for key, size in events:
        if size == 0:
            allocator.free(live.pop(key))
            continue
        try:
            live[key] = allocator.allocate(size)
        except OutOfMemory:
            ran_out = True
            break
        allocated = max(allocated, allocator.allocated_bytes)
        if allocator.reserved_bytes > reserved:
            reserved, stuck = allocator.reserved_bytes, allocator.stuck_bytes
            idle = reserved - allocator.allocated_bytes
    return Replayed(reserved, allocated, idle, stuck, allocator.retries, ran_out)


def replayed(events: Iterable[Event]) -> dict[str, dict[str, int]]:
    """What torch's allocator would have taken for it all, by figure and then by its setting."""
    log = list(events)
    replays = {"default": replay(log), "expandable": replay(log, expandable=True)}
    figures = ("reserved_bytes", "allocated_bytes", "idle_bytes", "stuck_bytes")
    return {figure: {name: getattr(result, figure) for name, result in replays.items()} for figure in figures}
