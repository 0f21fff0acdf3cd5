# SPDX-License-Identifier: Apache-2.0
"""Holds over a block pool like vLLM's, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from attnstore_vllm.config.hbm_holds import HoldingConfig
from attnstore_vllm.hints import HintReader
from attnstore_vllm.policy.gaps import RETURNS_MIN
from attnstore_vllm.policy.holding import Holding
from attnstore_vllm.scheduler.holds import HoldEvent, Holds

BLOCK = 16
ROOM = 100
TURN = 5
"""Blocks that a turn adds."""
S = 0.01
"""Seconds for computing a token: holding pays."""


@dataclass
class Block:
    number: int
    block_hash: object = None
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """The part of vLLM's that holds use."""

    hash_block_size = BLOCK

    def __init__(self, room: int) -> None:
        self.blocks = [Block(number) for number in range(room + 1)]
        self.blocks[0].is_null = True
        self.num_gpu_blocks = room + 1
        self.num_resets = 0

    @property
    def free(self) -> list[Block]:
        return [block for block in self.blocks[1:] if not block.ref_cnt]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return len(self.free) == self.num_gpu_blocks - 1


class Manager:
    def __init__(self, room: int) -> None:
        self.block_pool = Pool(room)

    def allocate_slots(self, request: Any, num_blocks: int) -> list[Block] | None:
        """Blocks that have its names, and new ones."""
        names = request.block_hashes[:num_blocks]
        there = {block.block_hash: block for block in self.block_pool.blocks[1:]}
        found = [there[name] for name in names if name in there]
        numbers = {block.number for block in found}
        new = [block for block in self.block_pool.free if block.number not in numbers]
        num_new = num_blocks - len(found)
        if num_new > len(new):
            return None
        blocks = found + sorted(new, key=lambda b: b.block_hash is not None)[:num_new]
        for block, name in zip(blocks, names, strict=True):
            block.block_hash = name
        self.block_pool.touch(blocks)
        return blocks

    def get_block_ids(self, request_id: str) -> Any:
        raise NotImplementedError


@dataclass
class World:
    config: HoldingConfig = field(default_factory=HoldingConfig)
    now: float = 0.0
    num: int = 0
    ttl_s: float | None = None
    """The server's."""
    room: int = ROOM

    def __post_init__(self) -> None:
        self.manager = Manager(self.room)
        self.pool = self.manager.block_pool
        self.holds = Holds(
            self.config, lambda tokens: S * tokens, HintReader(self.ttl_s), lambda: self.now
        )
        self.holds.bind(self.manager)

    def come(self, name: str, num_blocks: int) -> Any:
        return self.ask(name, [(name, number) for number in range(num_blocks)])

    def ask(self, name: str, names: Sequence[object]) -> Any:
        """A request comes whose blocks have these names."""
        self.num += 1
        request = SimpleNamespace(
            request_id=f"{name} {self.num}", block_hashes=[*names],
            resumable=False, skip_reading_prefix_cache=False, _block_hasher=None,
            num_tokens=len(names) * BLOCK, kv_transfer_params=None,
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )  # fmt: skip
        self.holds.came(request)
        return request

    def children(self, name: str, number: int, prompt: int, answer: int = 1) -> list[Any]:
        """So many requests of one prompt, as of one with `n`, and what they will have answered.
        Both lengths are in blocks."""
        return [self.child(name, one, prompt, answer) for one in range(number)]

    def child(self, name: str, number: int, prompt: int, answer: int = 1) -> Any:
        child = self.ask(f"{name}, child {number}", [(name, place) for place in range(prompt)])
        child.block_hashes += [(name, number, place) for place in range(answer)]
        child.num_tokens = BLOCK * len(child.block_hashes)
        return child

    @property
    def policy(self) -> Holding:
        assert self.holds.holding is not None
        return self.holds.holding

    @property
    def in_use(self) -> int:
        """Blocks."""
        return self.room - len(self.pool.free)

    def start(self, request: Any) -> list[Block] | None:
        found: list[Block] | None = self.manager.allocate_slots(request, len(request.block_hashes))
        return found

    def take(self, request: Any) -> list[Block]:
        blocks = self.start(request)
        assert blocks is not None
        return blocks

    def end(self, request: Any, blocks: list[Block]) -> None:
        self.holds.ended(request, [block.number for block in blocks])
        self.pool.free_blocks(blocks)
        self.holds.end_step(is_empty=False)

    def turn(self, name: str, num_blocks: int, params: Any = None) -> None:
        request = self.come(name, num_blocks)
        request.kv_transfer_params = params
        blocks = self.start(request)
        assert blocks is not None
        self.end(request, blocks)

    def learn(self, gap_s: float = 1.0) -> None:
        """So many sessions come back after so long that it is known."""
        for number in range(RETURNS_MIN):
            self.turn(f"early {number}", TURN)
            self.now += gap_s
            self.turn(f"early {number}", 2 * TURN)
        self.now += 60
        self.holds.end_step(is_empty=False)
        assert not self.held and not self.in_use
        self.holds.counts = dict.fromkeys(HoldEvent, 0)

    @property
    def held(self) -> int:
        return self.holds.held_tokens // BLOCK
