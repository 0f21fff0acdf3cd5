# SPDX-License-Identifier: Apache-2.0
"""The tiered store: one owner of DRAM and NVMe, on the scheduler side.

Two threads meet here, under one short lock that nobody holds across I/O:
- the scheduler's: looks up, holds, begins and finishes saves. Never waits, except where a
  method says so, and then with a deadline;
- ours (store/keeper.py): finishes what the device has completed, verifies, writes back. It
  works also while the engine core sleeps.

Bytes in DRAM come from HBM, or from NVMe after their checksum was verified; nothing else is
ever READY.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.index.chunk import Chunk, ChunkName, Dram
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece, confirm
from attnstore_vllm.index.residency import Residency
from attnstore_vllm.io.device import Device
from attnstore_vllm.policy.eviction import Lru, SlotLru
from attnstore_vllm.store.keeper import Keeper
from attnstore_vllm.store.slab import Slab
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import Flow, Tier

logger = logging.getLogger(__name__)

RESET_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 3.0


class Store:
    """See the module. All methods may be called from the scheduler's thread."""

    def __init__(self, pool: SharedPool, slab: Slab, device: Device, io_depth: int) -> None:
        self.residency = Residency(
            pool.num_slots, slab.num_records, Lru(), SlotLru(slab.num_records),
            chunk_tokens=slab.superblock.chunk_tokens, seed=secrets.randbits(64),
        )  # fmt: skip
        self.residency.open_nvme_slots(0, slab.num_records)
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._pool = pool
        self._slab = slab
        self._keeper = Keeper(self.residency, self._progress, pool, slab, device, io_depth)
        self._keeper.start()

    # ---- looking up --------------------------------------------------------------------

    def find(self, sequence: SequenceKeys, start: int, stop: int) -> list[Piece]:
        """The longest run of stored KV for tokens [start, stop), and bring it up to DRAM.

        What lies on NVMe is queued for reading, nearest first; nothing is waited for.
        """
        sequence.hash_up_to(stop)  # the costly part, before the lock
        with self._lock:
            pieces = self.residency.index.match(sequence, start, stop)
            # The last first, so that of one sequence its end is the least recently used part.
            for piece in reversed(pieces):
                self.residency.use(piece.chunk)
            self._keeper.want(p.chunk for p in pieces if p.chunk.dram is Dram.ABSENT)
        self._keeper.start_reads()
        return pieces

    def hold_ready(self, pieces: Sequence[Piece], sequence: SequenceKeys, stop: int) -> list[Piece]:
        """Hold the leading pieces that are READY in DRAM, and return them.

        The last may end elsewhere than find() said, with tokens [.., stop) of the sequence
        wanted: what it said of a chunk whose tokens were on NVMe was provisional.
        """
        held: list[Piece] = []
        with self._lock:
            for piece in pieces:
                if piece.chunk.dram is not Dram.READY or piece.chunk.dropped:
                    break
                confirmed = confirm(piece, sequence, stop)
                if confirmed is None:
                    break
                self.residency.hold(piece.chunk)
                held.append(confirmed)
        return held

    def release(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self.residency.release(chunk)

    def tiers(self, pieces: Sequence[Piece]) -> dict[Tier, int]:
        """Tokens by the tier their KV was in when the request came."""
        tokens = {Tier.DRAM: 0, Tier.NVME: 0}
        for piece in pieces:
            tier = Tier.NVME if piece.chunk.from_nvme else Tier.DRAM
            tokens[tier] += piece.stop - piece.start
        return tokens

    def loaded(self, chunks: Iterable[Chunk]) -> None:
        """The workers have copied the held chunks into HBM."""
        with self._lock:
            for chunk in chunks:
                chunk.from_nvme = False
                self.residency.release(chunk)

    # ---- saving ------------------------------------------------------------------------

    def begin_save(self, name: ChunkName) -> Chunk | None:
        """See Residency.begin_save."""
        with self._lock:
            return self.residency.begin_save(name)

    def finish_saves(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self.residency.finish_save(chunk)
        self._keeper.wake()

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Forget these chunks in all tiers, also those that are being saved."""
        with self._lock:
            for chunk in chunks:
                self.residency.drop(chunk)

    # ---- the rest ----------------------------------------------------------------------

    def wait_for_any(self, waiting: Sequence[Sequence[Piece]], timeout_s: float) -> None:
        """Wait until one of these runs need not be waited for any more, `timeout_s` at most.

        For steps that have nothing to compute: without it the engine core would spin on the
        processor that the I/O threads need.
        """
        with self._progress:
            self._progress.wait_for(lambda: any(map(_has_come, waiting)), timeout_s)

    def reset(self) -> bool:
        """Drop every tier, also for the next process. Waits for one page write, 5 s at most.

        Returns False if that page could not be written: then records of before could come
        back after a restart, and the caller must say that the reset failed.
        """
        deadline = time.monotonic() + RESET_DEADLINE_S
        with self._progress:
            self.residency.drop_all()
            ticket = self._keeper.ask_for_reset()
            while not self._keeper.reset_done(ticket):
                if not self._progress.wait(deadline - time.monotonic()):
                    return False
        return self._keeper.reset_succeeded(ticket)

    def counts(self) -> dict[str, int]:
        """Events since the start, by name."""
        with self._lock:
            return dict(self.residency.counts)

    def moved_bytes(self) -> dict[Flow, int]:
        """Bytes moved between DRAM and NVMe since the start."""
        with self._lock:
            return dict(self._keeper.moved_bytes)

    def held_bytes(self) -> dict[Tier, int]:
        with self._lock:
            return {
                Tier.DRAM: self.residency.dram_used * self._pool.slot_bytes,
                Tier.NVME: self.residency.nvme_used * self._slab.record_bytes,
            }

    def is_idle(self) -> bool:
        """Nothing dirty, nothing in flight, nothing held."""
        with self._lock:
            return self._keeper.is_idle() and self.residency.num_held() == 0

    def close(self) -> None:
        """Write back what is dirty, for CLOSE_DEADLINE_S at most; then stop."""
        try:
            self._keeper.stop(CLOSE_DEADLINE_S)
        except DeviceError as error:
            logger.warning("AttnStore closes without its NVMe tier: %s", error)
        self._pool.close()


def _has_come(pieces: Sequence[Piece]) -> bool:
    """Whether all of them are READY, or one never will be."""
    chunks = [piece.chunk for piece in pieces]
    return any(c.dropped for c in chunks) or all(c.dram is Dram.READY for c in chunks)
