# SPDX-License-Identifier: Apache-2.0
"""Names of blocks that only some requests find, in vLLM's prefix cache."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from attnstore_vllm.scheduler.approximate import Approximate
from attnstore_vllm.scheduler.hidden_blocks import hide_blocks

BLOCK = 4


def _hasher(request: Any) -> list[bytes]:
    """As vLLM's: a block is named by its tokens and the name of the one before."""
    names = list(request.block_hashes)
    num_known = len(names)
    while (len(names) + 1) * BLOCK <= len(request.tokens):
        block = request.tokens[len(names) * BLOCK : (len(names) + 1) * BLOCK]
        names.append(blake3((names[-1] if names else b"") + bytes(block)).digest())
    return names[num_known:]


class _Request:
    def __init__(self, num_tokens: int) -> None:
        self.tokens = list(range(num_tokens))
        self.block_hashes: list[bytes] = []
        self._block_hasher = _hasher
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))

    def grow(self, num_tokens: int) -> None:
        for token in range(len(self.tokens), len(self.tokens) + num_tokens):
            self.tokens.append(token)
            self.update_block_hashes()


class _State:
    def __init__(self, request: _Request) -> None:
        self.request = request
        self.approximate = None
        self.dram_only = False


def _begin(who: Approximate, num_tokens: int) -> Any:
    request = _Request(num_tokens)
    who.begin(_State(request), True)  # type: ignore[arg-type]
    return request


def test_the_next_turn_finds_the_answer_of_an_approximate_conversation() -> None:
    who = Approximate("int8")
    first = _begin(who, 10)
    first.grow(15)
    assert first.block_hashes == _begin(who, 25).block_hashes
    assert not set(first.block_hashes) & set(_Request(25).block_hashes)


def test_blocks_that_vllm_takes_away_are_named_anew() -> None:
    """An input of a session takes the place of what was drafted beyond the last one."""
    who = Approximate("int8")
    request, other = _begin(who, 16), _begin(who, 24)
    del request.block_hashes[2:]
    request.tokens[8:] = [9] * 8
    request.update_block_hashes()
    other.tokens[8:16] = [9] * 8
    other.block_hashes.clear()
    other.update_block_hashes()
    assert request.block_hashes == other.block_hashes[:4]


def test_blocks_that_are_shown_again_have_vllms_names() -> None:
    request: Any = _Request(10)
    names = hide_blocks(request, 1)
    assert names is not None
    request.grow(10)
    exact = _Request(20).block_hashes
    assert request.block_hashes[0] == exact[0]
    assert not set(request.block_hashes[1:]) & set(exact)
    names.show(request)
    assert request.block_hashes == exact
