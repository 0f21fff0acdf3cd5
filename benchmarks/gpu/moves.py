# SPDX-License-Identifier: Apache-2.0
"""Loads of tokens at other positions, over a load of as many tokens that stay where they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attnstore_vllm.transfer.cuda_moves import THREAD_BLOCKS
from attnstore_vllm.transfer.plan import Moved, StoredTokens, moved_table, plan_moves
from benchmarks.gpu.rig import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    KvRig,
    KvShape,
    Row,
    begin_seconds,
    in_turn,
)

AT_MOST = 1.02
CUTS = {"a whole block": BLOCK_TOKENS, "7 tokens": 7}
"""What is cut off before the history; with 7 each block is filled from two pages."""


def measure(shape: KvShape, num_tokens: int, rounds: int) -> list[Row]:
    rig = KvRig(shape, num_tokens, num_rows=0, moves=True)
    try:
        return _rows(rig, num_tokens, rounds)
    finally:
        rig.close()


def _rows(rig: KvRig, loaded_tokens: int, rounds: int) -> list[Row]:
    what = f"load with rotation over load without it, per token ({rig.shape.name})"
    why_not = rig.engine.why_not_moved
    if why_not is not None:
        return [Row(what, "all", None, AT_MOST, True, why_not, is_wrong=True)]
    works: dict[tuple[str, int], Callable[[], object]] = {}
    tokens: dict[str, int] = {}
    for name, cut in CUTS.items():
        moved, tokens[name] = _cut(rig, loaded_tokens, cut)
        for thread_blocks in sorted({THREAD_BLOCKS, 2, 4, 8, 16, 32}):
            works[name, thread_blocks] = partial(_move, rig, moved, thread_blocks)
    load = partial(rig.engine.load, rig.pages, rig.layers)
    load_s, *times = in_turn([load, *works.values()], rounds)
    rows = []
    for ((name, thread_blocks), work), took_s in zip(works.items(), times, strict=True):
        per_token = (took_s / tokens[name]) / (load_s / loaded_tokens)
        speed = rig.num_bytes * tokens[name] / loaded_tokens / took_s / 1e9
        rows.append(
            Row(
                what, f"cut by {name}, {thread_blocks} blocks", per_token,
                AT_MOST if thread_blocks == THREAD_BLOCKS else None, at_most=True,
                detail=f"{speed:.1f} GB/s, begun in {begin_seconds(work) * 1000:.2f} ms",
            )
        )  # fmt: skip
    return rows


def _move(rig: KvRig, moved: Moved, thread_blocks: int) -> None:
    (mover,) = rig.engine.token_movers
    mover.thread_blocks = thread_blocks
    rig.engine.move(moved, rig.layers)


def _cut(rig: KvRig, history: int, cut: int) -> tuple[Moved, int]:
    """The moves of a history without its first tokens, and how many tokens they have."""
    pieces = [
        StoredTokens(slot, max(0, cut - start), max(start, cut), max(start, cut) - cut, stop - cut)
        for slot, start in enumerate(range(0, history, CHUNK_TOKENS))
        for stop in (start + CHUNK_TOKENS,)
    ]
    runs = plan_moves(
        pieces, rig.pages[:, 2].tolist(), block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS
    )
    return moved_table(runs), sum(run.num_tokens for run in runs)
