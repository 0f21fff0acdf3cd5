# SPDX-License-Identifier: Apache-2.0
"""Codecs: how payloads become fewer bytes on their way to a tier behind, and bytes again.

A codec is a class here, and its native half in csrc/codec. Its name and version are on the disk:
a change of what it writes needs another version.

What is encoded begins with the checksum of the payload, which is compared with what was decoded.
The record's own checksum covers what is on the disk, and sees no fault of a coder or of memory.
Of an approximate codec it is that of what decoding gives, found out when the payload is encoded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from attnstore_vllm._native import (
    lossless_decode,
    lossless_encode,
    quantized_bytes,
    quantized_decode,
    quantized_encode,
)
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.daemon_pool import DaemonPool
from attnstore_vllm.io.device import CHECKSUM_BYTES
from attnstore_vllm.types import Clock

logger = logging.getLogger(__name__)


class Codec(ABC):
    """Encodes and decodes with the GIL released. From any thread."""

    name: str
    """16 bytes at most."""
    version: int
    is_exact: bool = True
    """Whether every bit comes back. Else only requests that may have such KV see what was decoded
    (scheduler/approximate.py)."""
    has_fast: bool = False
    """Whether it has a second coding: of more bytes, decoded faster."""

    @property
    def label(self) -> str:
        """Its name and version, on which decoded bytes depend where they are not those encoded."""
        return f"{self.name}/{self.version}"

    @abstractmethod
    def room(self, payload_bytes: int, dtype: str) -> int:
        """Bytes that a place on the disk has for a payload; one that takes more is not stored.

        Args:
            dtype: of the numbers of KV, as PyTorch or vLLM names it; "mixed": of several.
        """

    def encode(
        self, payload: memoryview, out: memoryview, num_tokens: int, fast: bool = False
    ) -> int:
        """The bytes written to `out`; 0: they have no room there.

        Args:
            num_tokens: that the payload has, from its first one on; behind them is anything.
            fast: by the coding that is decoded faster, if the codec has one and it has room.
        """
        size = self.pack(payload, out[CHECKSUM_BYTES:], num_tokens, fast)
        if not size:
            return 0
        end = CHECKSUM_BYTES + size
        out[:CHECKSUM_BYTES] = checksum(self.comes_back(payload, out[CHECKSUM_BYTES:end]))
        return end

    def decode(self, encoded: memoryview, out: memoryview) -> bool:
        """Fill `out`. False: that is not the payload that was encoded."""
        is_filled = self.unpack(encoded[CHECKSUM_BYTES:], out)
        return is_filled and checksum(out) == encoded[:CHECKSUM_BYTES]

    def is_fast(self, encoded: memoryview) -> bool:
        """Whether it is of the coding that is decoded faster."""
        return False

    def comes_back(self, payload: memoryview, packed: memoryview) -> memoryview:
        """The bytes that decoding gives."""
        return payload

    @abstractmethod
    def pack(
        self, payload: memoryview, out: memoryview, num_tokens: int, fast: bool = False
    ) -> int:
        """The bytes written to `out`; 0: they have no room there. See encode()."""

    @abstractmethod
    def unpack(self, packed: memoryview, out: memoryview) -> bool:
        """Fill `out`. False: `packed` is not of a payload of this size."""


class Lossless(Codec):
    """Every bit comes back. Sizes of numbers around zero: bf16 0.66, float16 0.85, float32 0.83.

    The fast coding takes 0.75 of bf16, and some for rare exponents. Of others it is the same.
    """

    name = "lossless"
    version = 3
    has_fast = True

    def room(self, payload_bytes: int, dtype: str) -> int:
        parts = 49 if dtype == "bfloat16" else 56
        return payload_bytes * parts // 64

    def is_fast(self, encoded: memoryview) -> bool:
        return len(encoded) > CHECKSUM_BYTES and encoded[CHECKSUM_BYTES] == 1

    def pack(
        self, payload: memoryview, out: memoryview, num_tokens: int, fast: bool = False
    ) -> int:
        return lossless_encode(payload, out, fast)

    def unpack(self, packed: memoryview, out: memoryview) -> bool:
        return lossless_decode(packed, out)


@dataclass(frozen=True, slots=True)
class PayloadShape:
    """How KV lies in a payload: of each rank and layer a unit of so many blocks, a page each."""

    dtype: str
    units: int
    blocks: int
    block_tokens: int
    num_heads: int
    head_dim: int
    key: tuple[int, ...]
    """See ContentSide (transfer/page_content.py)."""
    value: tuple[int, ...]

    def fields(self, kind: int, num_tokens: int) -> list[int]:
        """As csrc/codec/quantized.h has them."""
        _, *counts, key, value = astuple(self)
        return [kind, _NUMBERS.index(self.dtype), *counts, num_tokens, *key, *value]


_NUMBERS = ("bfloat16", "float16", "float32")
OUTLIERS_PART = 0.03
"""The part of a payload's bytes that a place has for outliers."""


class Quantized(Codec):
    """A byte a number: approximate. K by channel, V by token, outliers exact.

    Args:
        kind: see csrc/codec/quantized.h.
        shape: of what is encoded. None: it only decodes, for which a record says all itself.
    """

    version = 1
    is_exact = False

    def __init__(self, name: str, kind: int, shape: PayloadShape | None = None) -> None:
        self.name = name
        self._kind = kind
        self._shape = shape

    def of(self, shape: PayloadShape) -> Quantized:
        return Quantized(self.name, self._kind, shape)

    def room(self, payload_bytes: int, dtype: str) -> int:
        """0: a payload of so many bytes does not lie so."""
        assert self._shape is not None
        num_tokens = self._shape.blocks * self._shape.block_tokens
        size = quantized_bytes(self._shape.fields(self._kind, num_tokens), payload_bytes)
        return CHECKSUM_BYTES + size + round(OUTLIERS_PART * payload_bytes) if size else 0

    def comes_back(self, payload: memoryview, packed: memoryview) -> memoryview:
        decoded = memoryview(bytearray(len(payload)))
        if not self.unpack(packed, decoded):
            raise RuntimeError(f"codec {self.name} does not decode what it has encoded")
        return decoded

    def pack(
        self, payload: memoryview, out: memoryview, num_tokens: int, fast: bool = False
    ) -> int:
        assert self._shape is not None
        return quantized_encode(self._shape.fields(self._kind, num_tokens), payload, out)

    def unpack(self, packed: memoryview, out: memoryview) -> bool:
        return quantized_decode(self._kind, packed, out)


_ALL: tuple[Codec, ...] = (Lossless(), Quantized("int8", 1), Quantized("fp8", 2))
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}
_FAULTS = (MemoryError, RuntimeError, ValueError)
NONE = "none"
CODEC_NAMES = (NONE, *CODECS)


_SAMPLE_BYTES = 4 << 20
_TRIALS = 3


class Trial(NamedTuple):
    """A sample that was decoded by one of the codings."""

    is_fast: bool
    seconds: float
    num_bytes: int
    encoded_bytes: int


class Coders:
    """Threads of our own that encode and decode, each job whole on one of them."""

    def __init__(self, codec: Codec, num_threads: int) -> None:
        self.codec = codec
        self.num_threads = num_threads
        self._threads = DaemonPool(num_threads, "attnstore-codec")
        self._open: set[Future[None]] = set()

    def submit(self, job: Callable[[], None]) -> None:
        """From any thread; waits for nothing. As many are queued as there are requests."""
        future = self._threads.submit(job)
        self._open.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[None]) -> None:
        self._open.discard(future)
        error = None if future.cancelled() else future.exception()
        if error is not None:
            logger.error("a chunk is neither stored nor loaded: its codec failed", exc_info=error)

    def encode(
        self, payload: memoryview, out: memoryview, num_tokens: int, fast: bool
    ) -> int | None:
        """See Codec. None: it failed, for want of memory above all."""
        try:
            return self.codec.encode(payload, out, num_tokens, fast)
        except _FAULTS:
            logger.exception("codec %s could not encode a chunk: it is not stored", self.codec.name)
            return None

    def decode(self, encoded: memoryview, out: memoryview) -> bool:
        """See Codec. What a codec that fails was to decode counts as damaged."""
        try:
            return self.codec.decode(encoded, out)
        except _FAULTS:
            logger.exception("codec %s could not decode a chunk: it is lost", self.codec.name)
            return False

    def try_codings(self, clock: Clock) -> list[Trial]:
        """Decode numbers around zero in bf16, in each coding of a codec that has two.

        The fastest of a few: in the first one memory is new, and others may have the processor.
        """
        normal = np.random.default_rng(0).standard_normal(32768, np.float32)
        block = (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        sample = memoryview(block * (_SAMPLE_BYTES // len(block)))
        encoded, out = (memoryview(bytearray(len(sample))) for _ in range(2))
        trials = []
        for fast in (False, True):
            size = self.encode(sample, encoded, 0, fast)
            if not size:
                return []
            seconds = []
            for _ in range(_TRIALS):
                begun_at = clock()
                self.decode(encoded[:size], out)
                seconds.append(clock() - begun_at)
            trials.append(Trial(fast, min(seconds), len(sample), size))
        return trials

    def close(self, timeout_s: float) -> bool:
        """Jobs that have not begun never do. Returns False if one still touches its buffers."""
        self._threads.shutdown()
        begun = [future for future in list(self._open) if not future.cancel()]
        return not wait(begun, timeout_s).not_done
