"""What a store of a given size could at best hit on a trace: bounds that no tokens are needed for.

A store holds whole pages. When a request arrives, the leading pages of its prompt that are there
are hits (at most all tokens but the last, which has to be computed); afterwards its prompt is
there, most recently used from its end to its beginning, so that a prefix outlives what hangs on
it. Replies take no room, nothing is ever in use, and serving takes no time: everything that a
real cache loses to these counts as its loss.

* :func:`lru`: the **ideal for the capacity**, least recently used out first.
* :func:`clairvoyant`: the page whose next use is farthest away out first (Belady). No policy of
  equal pages can hit more; it knows the future.
* a capacity of ``None`` never evicts: **infinite**.
* :func:`online`: other policies, for comparison with ``lru``.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from bench.traces.mooncake import TraceRequest

__all__ = ["POLICIES", "clairvoyant", "lru", "online", "pages_of", "queried_tokens"]

Requests = Sequence[TraceRequest]


def pages_of(request: TraceRequest, page_size: int) -> list[int]:
    """Names of a prompt's pages. ``page_size`` must divide the trace's blocks."""
    per_block = request.block_tokens // page_size
    names = [h * per_block + i for h in request.hash_ids for i in range(per_block)]
    return names[: -(-request.input_length // page_size)]


def queried_tokens(requests: Requests) -> int:
    return sum(request.input_length for request in requests)


def _hit_tokens(request: TraceRequest, num_pages: int, page_size: int) -> int:
    return min(num_pages * page_size, request.input_length - 1)


def _leading(pages: list[int], held: object) -> int:
    count = 0
    for page in pages:
        if page not in held:  # type: ignore[operator]
            break
        count += 1
    return count


def lru(requests: Requests, capacity_pages: int | None, page_size: int) -> float:
    """Share of the prompts' tokens that are hits."""
    held: OrderedDict[int, None] = OrderedDict()
    limit = math.inf if capacity_pages is None else capacity_pages
    hits = 0
    for request in requests:
        pages = pages_of(request, page_size)
        hits += _hit_tokens(request, _leading(pages, held), page_size)
        for page in reversed(pages):
            held[page] = None
            held.move_to_end(page)
        while len(held) > limit:
            held.popitem(last=False)
    return hits / queried_tokens(requests)


def clairvoyant(requests: Requests, capacity_pages: int, page_size: int) -> float:
    """Share of the prompts' tokens that are hits."""
    prompts = [pages_of(request, page_size) for request in requests]
    next_use = list(_next_uses(prompts))
    held: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    hits = 0
    for request, pages, uses in zip(requests, prompts, next_use, strict=True):
        hits += _hit_tokens(request, _leading(pages, held), page_size)
        for depth, (page, use) in enumerate(zip(pages, uses, strict=True)):
            held[page] = use
            heapq.heappush(queue, (-use, -depth, page))
        while len(held) > capacity_pages:
            use, _, page = heapq.heappop(queue)
            if held.get(page) == -use:
                del held[page]
    return hits / queried_tokens(requests)


def _next_uses(prompts: list[list[int]]) -> Iterator[list[int]]:
    """For each page of each prompt, the number of the next prompt that has it."""
    never = len(prompts)
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        uses.append([following.get(page, never) for page in prompts[number]])
        following.update(dict.fromkeys(prompts[number], number))
    return reversed(uses)


Priority = Callable[[int, int, float], tuple[float, float]]
"""(use count, number of the request, priority evicted last) -> priority; the lowest goes."""

POLICIES: dict[str, Priority] = {
    "lru": lambda uses, now, floor: (now, 0.0),
    "lfu": lambda uses, now, floor: (uses, now),
    "lfu-aged": lambda uses, now, floor: (floor + uses, now),
    "reused-stay": lambda uses, now, floor: (now + (1000 if uses > 1 else 0), 0.0),
}


def online(requests: Requests, capacity_pages: int, page_size: int, priority: Priority) -> float:
    """Share of the prompts' tokens that are hits under ``priority``, ends of chains out first."""
    held: dict[int, tuple[float, float]] = {}
    uses: dict[int, int] = {}
    queue: list[tuple[tuple[float, float], int, int]] = []
    floor, hits = 0.0, 0
    for now, request in enumerate(requests):
        pages = pages_of(request, page_size)
        hits += _hit_tokens(request, _leading(pages, held), page_size)
        for depth, page in enumerate(pages):
            count = uses[page] = uses.get(page, 0) + 1 if page in held else 1
            rank = held[page] = priority(count, now, floor)
            heapq.heappush(queue, (rank, -depth, page))
        while len(held) > capacity_pages:
            rank, _, page = heapq.heappop(queue)
            if held.get(page) == rank:
                del held[page], uses[page]
                floor = rank[0]
    return hits / queried_tokens(requests)
