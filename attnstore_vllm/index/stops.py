# SPDX-License-Identifier: Apache-2.0
"""Where a hit may end: so that hits tell no more than those of a cache of whole blocks do.

Who can see how many tokens of a request were cached learns whether the store has them. Were any
number possible, the next token of somebody's prompt would cost one request a candidate. So a hit
ends at a multiple of GRAIN_TOKENS, as in vLLM's own cache of blocks of 16. That alone would take
from each turn of a conversation what stands after its last multiple. So there is one more stop,
the *end* of a stored sequence, and what makes it as expensive as the others:

    stored   |---- 16 ----|---- 16 ----|---- 16 ----|- r -|      0 < r < 16
    stops    0            16           32                 48 + r
                                          (48 is none: r tokens would lie between it and the end)

1. *The end is kept only if the answer was begun before the last multiple* (kept_end()): all tokens
   between the two were generated. Of the prompt before it hits tell multiples of 16 alone. Else
   the store keeps no more than whole blocks.
2. *No other stop of a stored chunk is within 16 tokens of its end* (stop_in()).
3. *What is stored depends on no part of a block.* A tail goes, or does not come, where a longer
   chunk has its whole blocks, be its rest as it may (PrefixIndex.extends, extended_by). So no
   other chunk offers the multiple before an end; and who stores guesses learns nothing from
   which of them stays.

4. *A use of an end is told by whole blocks.* A tail with an end is used by every request that has
   its whole blocks, be the tokens behind them as they may, and by no other: it is renewed, and
   moved in any order, whether or not the request has its end (PrefixIndex.ends_like). It is not
   pinned: the next turn of a conversation supersedes it anyway.

The claim, which tests/property/test_stops.py looks at: two stores that differ in one sequence, from
token n of its prompt on, answer alike to all who have not guessed its tokens up to the first
multiple of 16 after n. It is what a cache of whole blocks promises.

All numbers of tokens are counted from the beginning of a chunk, which is a multiple of 16 itself
(connector/build.py).
"""

from __future__ import annotations

from typing import Final

GRAIN_TOKENS: Final = 16
"""vLLM's usual block on GPUs. Tests of the index's own structure take smaller ones."""


def whole_blocks(num_tokens: int, grain: int = GRAIN_TOKENS) -> int:
    """The tokens in the leading whole blocks of so many."""
    return num_tokens // grain * grain


def kept_end(num_tokens: int, num_prompt_tokens: int, grain: int = GRAIN_TOKENS) -> int:
    """Up to where a sequence that has ended is stored: to its end, or to its last whole block.

    Args:
        num_tokens: of the sequence, that have KV.
        num_prompt_tokens: of them, those that were not generated.
    """
    whole = whole_blocks(num_tokens, grain)
    return num_tokens if whole >= num_prompt_tokens else whole


def stop_in(shared: int, num_tokens: int, grain: int = GRAIN_TOKENS) -> int:
    """How many of a stored chunk's tokens are a hit.

    Args:
        shared: leading tokens that the request has in common with it; it goes on behind them.
        num_tokens: that the chunk has.
    """
    if num_tokens % grain == 0:
        return whole_blocks(shared, grain)
    if shared == num_tokens >= grain:
        return num_tokens
    return max(0, whole_blocks(min(shared, num_tokens - grain), grain))
