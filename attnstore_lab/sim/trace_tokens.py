# SPDX-License-Identifier: Apache-2.0
"""Tokens of a trace's requests. A trace has none: all tokens of a chunk are its number."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class TraceTokens(Sequence[int]):
    """The token ids of one request.

    Args:
        chunks: their numbers; equal ones have equal chunks before them.
        num_known: tokens that they stand for; all chunks are whole but the last.
        unknown: follows them, for all of which the trace says nothing: a token that no other
            request has.
    """

    def __init__(
        self, chunks: npt.NDArray[np.int64], num_known: int, chunk_tokens: int, unknown: int
    ) -> None:
        self._chunks = chunks
        self._num_known = num_known
        self._chunk_tokens = chunk_tokens
        self._unknown = unknown

    def __len__(self) -> int:
        return self._num_known + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, int):
            return self[index : index + 1][0]
        start, stop, _ = index.indices(len(self))
        known = np.arange(start, min(stop, self._num_known)) // self._chunk_tokens
        found = array("q", self._chunks[known].tobytes())
        if stop > max(start, self._num_known):
            found.append(self._unknown)
        return found
