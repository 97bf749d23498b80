"""PyTorch's caching allocator of CUDA memory, replayed. Pure.

Input: allocations and frees, in their order (`allocations.py`). Output: allocated and reserved bytes, their
peaks, and whether a limit was passed. Follows `c10/cuda/CUDACachingAllocator.cpp` of torch 2.11: sizes in
blocks of 512 bytes; up to 1 MiB from a pool of small blocks; the best fitting free block first. Without
expandable segments memory comes in pieces of 2 MiB (small), 20 MiB (below 10 MiB) or the size rounded up to 2
MiB; with them each pool is one range that grows by pages of 2 and 20 MiB. Does not know streams or events.
"""

from bisect import bisect_left, insort

from graftwork.records.base import MIB

BLOCK = 512
"""CUDA's allocator hands out whole blocks."""
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
ROUND_LARGE = 2 * MIB
ENDLESS = 2**60


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class AllocatorLimitExceeded(Exception):
    """The limit is exceeded, even after everything cached was released."""


class MemoryBlock:
    """A piece of a segment: in use, free, or a range of addresses with nothing mapped to it."""

    __slots__ = ("after", "before", "mapped", "pool", "size", "start", "used")

    def __init__(self, pool: "Pool", start: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.start, self.size, self.mapped = pool, start, size, mapped
        self.used = False
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


class Pool:
    """Blocks of one kind of size."""

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, MemoryBlock]] = []
        """By size, then by address."""
        self.unmapped: list[tuple[int, MemoryBlock]] = []
        if expandable:
            self.unmapped.append((0, MemoryBlock(self, 0, ENDLESS, mapped=False)))

    def add(self, block: MemoryBlock) -> None:
        insort(self.free, (block.size, block.start, block))

    def remove(self, block: MemoryBlock) -> None:
        self.free.pop(bisect_left(self.free, (block.size, block.start)))


class Allocator:
    """`alloc` returns a block, `free` releases it. A recorded graph has its own `pool`."""

    def __init__(self, *, expandable: bool = True, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = self.allocated_peak = self.reserved_peak = 0
        self.pool = ""
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._next_address = 0

    def alloc(self, size: int) -> MemoryBlock:
        size = rounded(max(size, 1))
        key = (self.pool, size <= SMALL)
        if key not in self._pools:
            self._pools[key] = Pool(small=size <= SMALL, expandable=self.expandable)
        blocks = self._pools[key]
        block = self._cached(blocks, size)
        if block is None:
            block = self._fresh(blocks, size)
        if block is None:
            self.empty_cache()
            block = self._fresh(blocks, size)
        if block is None:
            raise AllocatorLimitExceeded(f"{size} bytes besides {self.allocated}")
        remainder = block.size - size
        if remainder >= BLOCK if blocks.small or self.expandable else remainder > SMALL:
            blocks.add(self._cut(block, size))
        block.used = True
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        self.allocated -= block.size
        block.used = False
        # Free neighbours leave the pool, and are part of it.
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped:
            before.pool.remove(before)
            block = _join(before, block)
        if after is not None and not after.used and after.mapped:
            after.pool.remove(after)
            _join(block, after)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Release unused memory: whole segments, or whole pages of a range."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def reset_peaks(self) -> None:
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def copy_without_handles(self) -> "Allocator":
        """Return a copy of the current state. Blocks in use stay allocated: the copy cannot free blocks of
        the original.
        """
        other = Allocator(expandable=self.expandable, limit=self.limit)
        other.allocated, other.reserved = self.allocated, self.reserved
        other.allocated_peak, other.reserved_peak = self.allocated_peak, self.reserved_peak
        other.pool, other._next_address = self.pool, self._next_address
        other._pools = {key: _copy_pool(pool) for key, pool in self._pools.items()}
        return other

    def _cached(self, pool: Pool, size: int) -> MemoryBlock | None:
        """The smallest free block that is large enough."""
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        if self.expandable:
            # A block that could grow counts as large as it could become.
            while index + 1 < len(pool.free) and _could_be(pool.free[index + 1][2]) < _could_be(
                pool.free[index][2]
            ):
                index += 1
        block: MemoryBlock = pool.free.pop(index)[2]
        return block

    def _fresh(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Allocate memory from the GPU; None if that would exceed the limit."""
        segment_bytes = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        if size >= OWN_SEGMENT:
            segment_bytes = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self.limit is not None and self.reserved + segment_bytes > self.limit:
            return None
        if self.expandable:
            return self._grown(pool, size)
        self._reserve(segment_bytes)
        block = MemoryBlock(pool, self._next_address, segment_bytes)
        self._next_address += segment_bytes + ROUND_LARGE
        return block

    def _grown(self, pool: Pool, size: int) -> MemoryBlock:
        """Return the lowest range that is free or unmapped, mapped as far as needed."""
        for _, hole in pool.unmapped:
            first = hole.before if hole.before is not None and not hole.before.used else hole
            room, block = 0, first
            while block is not None and not block.used and room < size:
                room += block.size
                block = block.after  # type: ignore[assignment]
            if room >= size:
                break
        if first.mapped:
            pool.remove(first)
        else:
            self._map(pool, first, size)
        while first.size < size:
            following = first.after
            assert following is not None
            if following.mapped:
                pool.remove(following)
            else:
                self._map(pool, following, size - first.size)
            _join(first, following)
        # Pages may have filled the hole up to the next free block.
        if first.after is not None and first.after.mapped and not first.after.used:
            pool.remove(first.after)
            _join(first, first.after)
        return first

    def _map(self, pool: Pool, hole: MemoryBlock, size: int) -> None:
        """Map pages from the start of a hole; the last may exceed the limit slightly."""
        size = min(-(-size // pool.page) * pool.page, hole.size)
        pool.unmapped.pop(bisect_left(pool.unmapped, (hole.start,)))
        if hole.size > size:
            remainder = MemoryBlock(pool, hole.start + size, hole.size - size, mapped=False)
            _link_after(hole, remainder)
            insort(pool.unmapped, (remainder.start, remainder))
            hole.size = size
        hole.mapped = True
        self._reserve(size)

    def _unmap(self, block: MemoryBlock) -> None:
        """Unmap the whole pages within a free block; the remainders at its ends stay free."""
        pool = block.pool
        first_page = -(-block.start // pool.page) * pool.page
        end = (block.start + block.size) // pool.page * pool.page
        if end <= first_page:
            return
        pool.remove(block)
        if block.start < first_page:
            head, block = block, self._cut(block, first_page - block.start)
            pool.add(head)
        if block.start + block.size > end:
            pool.add(self._cut(block, end - first_page))
        block.mapped = False
        self.reserved -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.mapped:
                pool.unmapped.pop(bisect_left(pool.unmapped, (neighbour.start,)))
                block = _join(*sorted((block, neighbour), key=lambda block: block.start))
        insort(pool.unmapped, (block.start, block))

    @staticmethod
    def _cut(block: MemoryBlock, size: int) -> MemoryBlock:
        """Split off what follows the first `size` bytes as a separate block."""
        remainder = MemoryBlock(block.pool, block.start + size, block.size - size, mapped=block.mapped)
        _link_after(block, remainder)
        block.size = size
        return remainder

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)


def _copy_pool(pool: Pool) -> Pool:
    """Copy a pool, with adjacent blocks in use merged, and without segments that are fully in use."""
    other = Pool(small=pool.small, expandable=False)
    visited = set[MemoryBlock]()
    for block in (*(entry[2] for entry in pool.free), *(entry[1] for entry in pool.unmapped)):
        if block in visited:
            continue
        original: MemoryBlock | None = block
        while original is not None and original.before is not None:
            original = original.before
        last: MemoryBlock | None = None
        while original is not None:
            visited.add(original)
            if last is not None and last.used and original.used:
                last.size += original.size
            else:
                copied = MemoryBlock(other, original.start, original.size, mapped=original.mapped)
                copied.used, copied.before = original.used, last
                if last is not None:
                    last.after = copied
                last = copied
                if not copied.mapped:
                    other.unmapped.append((copied.start, copied))
                elif not copied.used:
                    other.free.append((copied.size, copied.start, copied))
            original = original.after
    other.free.sort(key=lambda entry: entry[:2])
    other.unmapped.sort(key=lambda entry: entry[0])
    return other


def _could_be(block: MemoryBlock) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _link_after(block: MemoryBlock, new: MemoryBlock) -> None:
    new.before, new.after = block, block.after
    if block.after is not None:
        block.after.before = new
    block.after = new


def _join(left: MemoryBlock, right: MemoryBlock) -> MemoryBlock:
    left.size += right.size
    left.after = right.after
    if right.after is not None:
        right.after.before = left
    return left
