# SPDX-License-Identifier: Apache-2.0
"""One random story: a caller that keeps the rules of transfer/engine.py, beside what must come of
it, which is program order. Calls of the driver are refused now and then.

Rows, slots and blocks are used again as soon as the rules allow it; nothing else is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch

from attnstore_vllm.errors import CopyError
from tests.cuda_world import Rank, draw_shape, installed, make_ranks
from tests.engine_helpers import Bytes, table
from tests.fake_gpu import FakeGpu

REFUSED = (
    "cuLaunchKernel",
    "cuMemcpy",
    "cuMemcpyBatchAsync",
    "cuEventRecord",
    "cuEventCreate",
    "cuStreamWaitEvent",
)
"""Calls that are refused, by the beginnings of their names."""


class WrongBytesError(AssertionError):
    """Some bytes are not what program order makes of them."""


class RankStory:
    """The story of one rank, and what of it is not over."""

    def __init__(self, rank: Rank, random: Random, counts: Counter[str]) -> None:
        self.rank, self.random, self.counts = rank, random, counts
        self.shape, self.engine = rank.shape, rank.engine
        self.rows = list(range(self.shape.rows))
        self.busy_slots: dict[int, list[Any]] = {}
        self.draining: list[tuple[list[Any], list[int]]] = []
        """Events, and the rows that are free after them."""
        self.in_use: list[tuple[Any, set[int], bool]] = []
        """Event, its blocks, and whether they are read and not filled."""
        self.seen: list[tuple[torch.Tensor, Bytes]] = []
        self.value = 0
        self.mark: Any = None
        self.touched: set[int] = set()
        """Blocks that the model was given work on since its mark."""

    def step(self) -> None:
        acts = [
            self.compute,
            self.read,
            self.save,
            self.gather,
            self.load,
            self.load,
            self.poll,
            self.set_mark,
        ]
        if self.shape.moves:
            acts.append(self.move)
        act = self.random.choice(acts)
        self.counts[act.__name__] += 1
        self.rank.enter()
        act()

    # ---- the model ---------------------------------------------------------------------

    def compute(self) -> None:
        """The model may write to a block whose copies it has waited for."""
        block = self.random.randrange(self.shape.blocks)
        self.wait_for({block})
        self.put([block])

    def put(self, blocks: list[int]) -> None:
        self.touched.update(blocks)
        self.value = (self.value + 1) % 100
        value, rank = self.value, self.rank
        for block in blocks:
            for layer in range(self.shape.layers):
                rank.gpu.model.run(partial(rank.put, layer, block, value))
                rank.expect(layer, block, value)

    def read(self) -> None:
        block = self.random.randrange(self.shape.blocks)
        layer = self.random.randrange(self.shape.layers)
        self.wait_for({block}, fills=True)
        self.touched.add(block)
        source = self.rank.blocks[layer]
        found = torch.zeros_like(source[block], memory_format=torch.contiguous_format)
        self.rank.gpu.model.run(lambda: found.copy_(source[block]))
        self.seen.append((found, self.rank.hbm[layer][block].copy()))

    def wait_for(self, blocks: set[int], fills: bool = False) -> None:
        """Args: fills: only for copies that fill the blocks."""
        for event, used, is_read in self.in_use:
            if used & blocks and not (fills and is_read):
                self.engine.model_waits(event)

    def poll(self) -> None:
        """Time passes."""
        for _ in range(self.random.randrange(40)):
            self.rank.gpu.step()
        for one in list(self.draining):
            if all(event.done() for event in one[0]):
                self.rows += one[1]
                self.draining.remove(one)
        self.in_use = [one for one in self.in_use if not one[0].done()]

    def set_mark(self) -> None:
        self.mark, self.touched = self.engine.mark(), set()

    def mark_for(self, blocks: list[int]) -> Any:
        """A load comes after a mark behind which the model has nothing to do with its blocks."""
        if self.mark is None or self.touched & set(blocks):
            return self.random.choice((None, self.engine.mark()))
        return self.mark

    # ---- copies ------------------------------------------------------------------------

    def load(self) -> None:
        slots = self.free_slots()
        blocks = self.free_blocks(len(slots))
        if not slots or len(blocks) < len(slots):
            return
        pages = self.pages(slots, blocks)
        mark = self.mark_for(blocks)
        good, is_whole = self.give(lambda part: self.engine.load(pages, part, mark))
        self.filled(slots, blocks, good, is_whole)
        if is_whole:
            for layer, in_slots in enumerate(self.rank.in_slots):
                for slot, within, block in pages:
                    self.rank.hbm[layer][block] = in_slots[slot, within]

    def move(self) -> None:
        """Tokens go where others are, of a block that stays; nothing turns."""
        slots, tokens = self.free_slots(), self.shape.block_tokens
        blocks = self.free_blocks(len(slots))
        if not slots or len(blocks) < len(slots):
            return
        runs = []
        for slot, block in zip(slots, blocks, strict=True):
            within = self.random.randrange(tokens)
            count = self.random.randint(1, tokens - within)
            first = self.random.randint(0, self.shape.within * tokens - count)
            runs.append((slot, first, count, block, within, 0))
        moved = np.array(runs, np.int64)
        good, is_whole = self.give(lambda part: self.engine.move(moved, part))
        self.filled(slots, blocks, good, is_whole)
        if is_whole:
            for slot, first, count, block, within, _ in runs:
                self.rank.expect_move((slot, first, count, block, within))

    def filled(self, slots: list[int], blocks: list[int], good: list[Any], whole: bool) -> None:
        """What a copy refused to fill is the model's at once."""
        for slot in slots:
            self.busy_slots[slot] = good
        self.in_use += [(event, set(blocks), False) for event in good]
        if not whole:
            for event in good:
                self.engine.model_waits(event)
            self.put(blocks)

    def save(self) -> None:
        """Without the write buffer."""
        slots = self.free_slots()
        blocks = self.random.sample(range(self.shape.blocks), len(slots))
        if not slots:
            return
        self.wait_for(set(blocks), fills=True)
        pages = self.pages(slots, blocks)
        good, is_whole = self.give(lambda part: self.engine.save(pages, part))
        self.in_use += [(event, set(blocks), True) for event in good]
        self.saved(pages, good, is_whole)

    def gather(self) -> None:
        """Through the write buffer."""
        slots = self.free_slots()[: len(self.rows)]
        if not slots:
            return
        blocks = self.random.sample(range(self.shape.blocks), len(slots))
        self.wait_for(set(blocks), fills=True)
        pages = self.pages(slots, blocks)
        self.touched.update(blocks)
        rows = [self.rows.pop(self.random.randrange(len(self.rows))) for _ in slots]
        given = np.array(rows)
        parts = self.parts()
        self.give(lambda part: self.engine.gather(pages, given, part), parts)
        good, is_whole = self.give(lambda part: self.engine.drain(pages, given, part), parts)
        self.draining.append((good, rows))
        self.saved(pages, good, is_whole)

    def saved(self, pages: Any, good: list[Any], whole: bool) -> None:
        """What a copy refused to fill is the store's at once."""
        for slot, within, block in pages:
            self.busy_slots[int(slot)] = good
            for layer, in_slots in enumerate(self.rank.in_slots):
                in_slots[slot, within] = self.rank.hbm[layer][block]
        if whole:
            return
        for event in good:
            self.engine.wait(event)
        for slot, within, _ in pages:
            self.value = (self.value + 1) % 100
            self.rank.put_in_slot(int(slot), int(within), self.value)

    def give(
        self, begin: Callable[[range], Any], parts: list[range] | None = None
    ) -> tuple[list[Any], bool]:
        """Begin a copy in one part or layer by layer. The events of what was taken, and whether
        that is all of it."""
        good, is_whole = [], True
        if self.random.random() < 0.1:
            self.rank.gpu.fail(self.random.choice(REFUSED), self.random.choice((0, 0, 0, 1, 2, 5)))
        events = [begin(part) for part in (self.parts() if parts is None else parts)]
        self.rank.gpu.forgive()
        for event in filter(None, events):
            try:
                event.done()
                good.append(event)
            except CopyError:
                self.counts["refused"] += 1
                is_whole = False
        return good, is_whole

    def parts(self) -> list[range]:
        layers = range(self.shape.layers)
        if self.random.random() < 0.5:
            return [layers]
        return [range(layer, layer + 1) for layer in layers]

    def pages(self, slots: list[int], blocks: list[int]) -> Any:
        return table(
            *(
                (slot, self.random.randrange(self.shape.within), block)
                for slot, block in zip(slots, blocks, strict=True)
            )
        )

    def free_slots(self) -> list[int]:
        free = [
            slot
            for slot in range(self.shape.slots)
            if all(event.done() for event in self.busy_slots.get(slot, []))
        ]
        return self.random.sample(free, min(len(free), self.random.randint(1, 3)))

    def free_blocks(self, count: int) -> list[int]:
        """That no copy reads any more; one that the model writes may be among them."""
        read = {
            b for event, used, is_read in self.in_use if is_read and not event.done() for b in used
        }
        free = [block for block in range(self.shape.blocks) if block not in read]
        return self.random.sample(free, min(len(free), count))

    def check(self, wrong: list[str]) -> None:
        wrong += self.rank.wrong()
        for found, wanted in self.seen:
            if not np.array_equal(found.flatten().view(torch.uint8).numpy(), wanted):
                wrong.append(f"rank {self.rank.rank}: what the model has read")


def tell(seed: int, steps: int = 120) -> Counter[str]:
    """One story. Returns how often each thing happened. Raises WrongBytesError."""
    random = Random(seed)
    torch.manual_seed(seed)
    shape = draw_shape(random)
    gpu = FakeGpu(seed)
    counts: Counter[str] = Counter()
    with installed(gpu):
        versions, busy = random.choice([12040, 13000, 13000]), random.choice([0, 10, 60])
        for rank in range(shape.ranks):
            gpu.use(rank)
            gpu.set(driver_version=versions, busy=busy)
        slots, ranks = make_ranks(gpu, shape, random)
        stories = [RankStory(rank, random, counts) for rank in ranks]
        for _ in range(steps):
            random.choice(stories).step()
        wrong: list[str] = []
        for story in stories:
            story.rank.enter()
            if random.random() < 0.5:
                gpu.synchronize()
                story.check(wrong)
            story.engine.close()
            gpu.raise_errors()
            story.check(wrong)
            for call in ("cuLaunchKernel", "cuMemcpyBatchAsync", "cuMemcpyAsync"):
                counts[call] += gpu.count(call)
            counts["pieces"] += gpu.clock
            if gpu.registered:
                wrong.append(f"rank {story.rank.rank}: its slots stay page-locked")
        used = ranks[0].geometry.rank_bytes * shape.ranks
        if slots[:, used:].any():
            wrong.append("slots behind the last rank's part")
    if wrong:
        raise WrongBytesError(f"story {seed}: {', '.join(dict.fromkeys(wrong))}; {shape}")
    counts["stories"] += 1
    return counts
