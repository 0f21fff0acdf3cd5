# SPDX-License-Identifier: Apache-2.0
"""Tails that a hit curve follows: which of them does a text begin with?

A tail is the part of a chunk that a conversation has come to. It is known by its place, which is
the chunk before it, by its length, and by a checksum of its tokens: they themselves are not kept.
Two texts of one checksum would cost an estimate a token or two, and no answer. Pure: no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from attnstore_vllm.types import TOKEN_BYTES


class Tails:
    """Some tails, each by its mark: a number that no other chunk has."""

    def __init__(self) -> None:
        self._at: dict[int, dict[int, dict[int, int]]] = {}
        """Marks by place, then by the bytes of their tokens, then by their checksum."""
        self._where: dict[int, tuple[int, int, int]] = {}
        """The same, the other way round."""

    def __contains__(self, mark: int) -> bool:
        return mark in self._where

    def __len__(self) -> int:
        return len(self._where)

    def add(self, mark: int, place: int, extra: bytes, tokens: bytes) -> None:
        """No other one has these tokens there.

        Args:
            place: the mark of the chunk before it.
            extra: what makes a chunk another one beside its tokens.
            tokens: encoded.
        """
        size, checksum = len(tokens), crc32(tokens, crc32(extra))
        self._at.setdefault(place, {}).setdefault(size, {})[checksum] = mark
        self._where[mark] = place, size, checksum

    def remove(self, mark: int) -> None:
        """No such tail: nothing happens."""
        where = self._where.pop(mark, None)
        if where is None:
            return
        place, size, checksum = where
        sizes = self._at[place]
        del sizes[size][checksum]
        if not sizes[size]:
            del sizes[size]
        if not sizes:
            del self._at[place]

    def among(self, places: Sequence[int]) -> list[int]:
        """The numbers of the places that have tails."""
        at = self._at
        return [number for number, place in enumerate(places) if place in at] if at else []

    def heads_of(self, place: int, extra: bytes, tokens: bytes) -> list[tuple[int, int]]:
        """(mark, number of tokens) of those at a place with which a text begins, longest first.

        Cost: a microsecond for each length that a tail has there.
        """
        sizes = self._at.get(place)
        found: list[tuple[int, int]] = []
        if sizes is None:
            return found
        start, checksum = 0, crc32(extra)
        for size in sorted(sizes):
            if size > len(tokens):
                break
            start, checksum = size, crc32(tokens[start:size], checksum)
            if (mark := sizes[size].get(checksum)) is not None:
                found.append((mark, size // TOKEN_BYTES))
        return found[::-1]
