# SPDX-License-Identifier: Apache-2.0
"""The codec of NVMe while it serves: how long reads and decoding take, which of its codings is
written, and what the log is told of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from attnstore_vllm.io.codec import Coders
from attnstore_vllm.policy.codec_cost import CodecCost
from attnstore_vllm.types import Clock

logger = logging.getLogger(__name__)


class CodecWatch:
    """From any thread. Args: path: of the file that is read."""

    def __init__(self, coders: Coders, path: Path, clock: Clock) -> None:
        self.cost = CodecCost(coders.num_threads, has_fast=coders.codec.has_fast)
        self._coders = coders
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._has_said_later = False
        if coders.codec.has_fast:
            coders.submit(self._try)

    @property
    def is_fast(self) -> bool:
        """Whether records are written by the codec's fast coding."""
        return self.cost.is_fast

    def _try(self) -> None:
        """On a thread of the codec."""
        trials = self._coders.try_codings(self._clock)
        with self._lock:
            for trial in trials:
                self.cost.tried(*trial)

    def read(self, seconds: float, num_bytes: int) -> None:
        """See CodecCost."""
        with self._lock:
            self.cost.read(seconds, num_bytes)

    def decoded(self, is_fast: bool, seconds: float, num_bytes: int, encoded_bytes: int) -> None:
        """See CodecCost. Changes the coding where that brings hits earlier."""
        with self._lock:
            self.cost.decoded(is_fast, seconds, num_bytes, encoded_bytes)
            changes = self.cost.decide()
            # What has just changed shows only when it is read.
            says_later = self.cost.is_later and not self._has_said_later
            self._has_said_later |= says_later
            written = self.cost.is_fast
            read, small, fast = (
                f"{speed / 1e9:.2f}"
                for speed in (self.cost.read_speed, *map(self.cost.decode_speed, (False, True)))
            )
        name = self._coders.codec.name
        if changes:
            logger.info(
                "nvme.codec: %s writes its %s coding from now on, since the other one brings hits "
                "later: %s reads %s GB/s, and %s GB/s are decoded of the small one, %s of the "
                "fast one",
                *(name, "fast" if written else "small", self._path, read, small, fast),
            )
        if says_later:
            logger.warning(
                "nvme.codec: %s brings hits later than the disk alone would: %s reads %s GB/s, "
                "and %s GB/s are decoded; set it to none, or give the server more processors",
                *(name, self._path, read, fast if written else small),
            )
