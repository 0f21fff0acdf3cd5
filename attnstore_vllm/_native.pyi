# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from attnstore_vllm.types import Key

Copies = npt.NDArray[np.int64]

def encode_tokens(token_ids: list[int]) -> bytes: ...
def encode_chunks(
    token_ids: list[int], chunk_tokens: int, first: int, stop: int
) -> list[bytes]: ...
def hash_chunks(
    token_ids: list[int],
    chunk_tokens: int,
    first: int,
    stop: int,
    parent: Key,
    extras: tuple[bytes, ...],
) -> tuple[list[bytes], list[Key]]: ...

class PageShape:
    """Where pages are in slots, in blocks and in rows of a write buffer."""

    def __init__(
        self,
        *,
        slots_base: int,
        num_slots: int,
        slot_bytes: int,
        layer_bytes: int,
        page_bytes: int,
        layer_bases: list[int],
        num_blocks: int,
        block_stride: int,
        run_offsets: list[int],
        run_bytes: int,
        rows_base: int = 0,
        num_rows: int = 0,
    ) -> None: ...

class RotationShape:
    """Where K and V are in a page, and how K turns."""

    def __init__(
        self,
        *,
        key: tuple[int, ...],
        value: tuple[int, ...],
        num_heads: int,
        head_dim: int,
        block_tokens: int,
        dtype: str,
        is_neox: bool,
        theta: list[float],
    ) -> None:
        """Args: dtype: "bfloat16", "float16" or "float32"."""

class PageCopier:
    def __init__(self, pages: PageShape) -> None: ...
    def load(self, copies: Copies, first_layer: int, stop_layer: int) -> None: ...
    def save(self, copies: Copies, first_layer: int, stop_layer: int) -> None: ...

class EncodedCopier:
    def __init__(self, pages: PageShape, cell_bytes: int) -> None: ...
    def load(self, copies: Copies, first_layer: int, stop_layer: int) -> None:
        """Raises RuntimeError where a cell holds no page."""

    def save(self, copies: Copies, first_layer: int, stop_layer: int) -> list[int]:
        """Returns the slots of which a page did not fit in its cell."""

class PageRotator:
    def __init__(self, pages: PageShape, rotation: RotationShape) -> None: ...
    def load(self, moved: Copies, first_layer: int, stop_layer: int) -> None: ...

def omp_team_size() -> int:
    """Threads that a copy runs on."""

def lossless_bound(raw_bytes: int) -> int:
    """The most bytes that encoding so many may take."""

def lossless_encode(raw: Buffer, out: Buffer, fast: bool) -> int:
    """Encode the whole buffer. Returns the bytes written; 0: `out` has too few.

    Args:
        fast: in more bytes that are decoded faster, if there is room for them.
    """

def lossless_decode(encoded: Buffer, out: Buffer) -> bool:
    """Fill `out`. False if that is not what was encoded; `out` may have been written to then."""

def quantized_bytes(fields: Sequence[int], raw_bytes: int) -> int:
    """Bytes of an encoding without outliers; 0: the fields are not of such a payload."""

def quantized_encode(fields: Sequence[int], raw: Buffer, out: Buffer) -> int:
    """Encode the whole buffer. Returns the bytes written; 0: `out` has too few, or the fields
    (csrc/codec/quantized.h) are of another payload."""

def quantized_decode(kind: int, encoded: Buffer, out: Buffer) -> bool:
    """Fill `out`. False if that is not what was encoded; `out` may have been written to then."""

has_uring: bool
"""Whether Uring is there: the extension was built with liburing and xxhash.h."""

def page_checksums(pages: Buffer, page_bytes: int, zero_at: int) -> bytes:
    """Not there if the extension was built without xxhash.h."""

def copy_checksums(copies: Sequence[tuple[Buffer, Sequence[Buffer]]]) -> bytes:
    """Fill each first buffer with what the others have, one behind the other. Returns the XXH3-128
    of each copy, one after the other. Not there if the extension was built without xxhash.h."""

class Uring:
    def __init__(
        self,
        *,
        fd: int,
        depth: int,
        regions: list[tuple[int, int]],
        piece_bytes: int,
        num_hash_threads: int,
    ) -> None: ...
    @property
    def has_regions(self) -> bool: ...
    def submit(
        self,
        requests: Sequence[
            tuple[int, int, int, tuple[memoryview, ...], tuple[tuple[int, int], ...], bool, int]
        ],
    ) -> bool: ...
    def cancel(self, tags: list[int]) -> None: ...
    def poll(self, timeout_s: float) -> list[tuple[int, int, str, bytes]]: ...
    def wake(self) -> None: ...
    def failure(self) -> str: ...
    def close(self, timeout_s: float) -> bool: ...

record_offsets: dict[str, int]
"""Offsets, in bytes, of the fields of a record's header that recovery reads; negative: from its
end."""

class PrefixIndex:
    def __init__(self, chunk_tokens: int, seed: int, expected: int, grain: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def piece_tokens(self) -> int: ...
    def find(self, key: bytes) -> int: ...
    def find_run(self, keys: Sequence[bytes]) -> list[int]: ...
    def ids(self) -> npt.NDArray[np.uint32]: ...
    def record(self, id: int) -> tuple[Key, Key, bytes, bytes, int, int, bool, int, bytes]: ...
    def add(
        self,
        key: bytes,
        parent: bytes,
        extra: bytes,
        tenant: bytes,
        position: int,
        tokens: bytes,
        is_alone: bool,
    ) -> int: ...
    def remove(self, id: int) -> None: ...
    def clear(self) -> None: ...
    def bind(self, id: int, slot: int, checksum: bytes) -> None: ...
    def unbind(self, id: int) -> None: ...
    def sequences(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]: ...
    def heads_of(self, parent: bytes, extra: bytes, tokens: bytes, look_max: int) -> list[int]: ...
    def around(
        self, parent: bytes, extra: bytes, tokens: bytes, count_max: int
    ) -> list[tuple[int, int]]: ...
    def adopt(
        self, headers: memoryview, slots: npt.NDArray[np.uint32], header_bytes: int
    ) -> tuple[
        npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint32], int, int, int
    ]: ...

class ContentIndex:
    def __init__(self, chunk_tokens: int, max_chunks: int, seed: int) -> None: ...
    def __len__(self) -> int: ...
    def memory_bytes(self) -> int: ...
    def add(
        self,
        key: bytes,
        parent: bytes,
        domain: bytes,
        tokens: bytes,
        native_from: int,
        is_exact: bool,
    ) -> None: ...
    def remove(self, key: bytes) -> bool: ...
    def clear(self) -> None: ...
    def find(
        self,
        domain: bytes,
        tokens: bytes,
        start: int,
        stop: int,
        min_extent: int,
        max_extents: int,
    ) -> list[list[tuple[Key, int, int, int, bytes, bool]]]: ...
    def find_all(
        self,
        domain: bytes,
        tokens: bytes,
        start: int,
        stop: int,
        min_extent: int,
        max_extents: int,
    ) -> list[list[tuple[Key, int, int, int, bytes, bool]]]: ...
    def work(self) -> tuple[int, int, int, int, int]: ...
