# SPDX-License-Identifier: Apache-2.0
"""Damages of stored bytes, the same for every system: of its pieces, and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from attnstore_vllm.errors import AttnStoreError
from benchmarks.others_parts.systems import Piece

TOP_OF_EXPONENT: Final = 0x40
"""Of the second byte of a bf16 number, in the machine's order of bytes."""


class NothingStoredError(AttnStoreError):
    """A system left no pieces, so that there is nothing to damage."""


def flip_bit(pieces: Sequence[Piece]) -> None:
    """One bit of one number in the middle of the first piece: the top of its exponent, of a number
    below 2, which is very large then. Another bit may change no answer, and so prove nothing."""
    piece = _first(pieces)
    with piece.path.open("r+b") as file:
        at = piece.offset + piece.size // 2 // 2 * 2
        file.seek(at)
        data = file.read(piece.offset + piece.size - at)
        for i in range(1, len(data), 2):
            if data[i] and not data[i] & TOP_OF_EXPONENT:
                file.seek(at + i)
                file.write(bytes([data[i] | TOP_OF_EXPONENT]))
                return
    raise NothingStoredError(f"{piece.path} has no number in its second half")


def swap(pieces: Sequence[Piece]) -> None:
    """The bytes of the first two pieces change places."""
    one, *others = pieces if pieces else [_first(pieces)]
    other = next((p for p in others if p.size == one.size), None)
    if other is None:
        raise NothingStoredError("no two pieces of one size")
    first, second = _read(one), _read(other)
    assert first != second
    _write(one, second)
    _write(other, first)


def cut(pieces: Sequence[Piece]) -> None:
    """The first piece's file ends in the middle of it: a write that a full disk cut short."""
    piece = _first(pieces)
    os.truncate(piece.path, piece.offset + piece.size // 2)


def _first(pieces: Sequence[Piece]) -> Piece:
    if not pieces:
        raise NothingStoredError("it stored nothing that outlives the process")
    return pieces[0]


def _read(piece: Piece) -> bytes:
    with piece.path.open("rb") as file:
        file.seek(piece.offset)
        return file.read(piece.size)


def _write(piece: Piece, data: bytes) -> None:
    with piece.path.open("r+b") as file:
        file.seek(piece.offset)
        file.write(data)
