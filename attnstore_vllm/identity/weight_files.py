# SPDX-License-Identifier: Apache-2.0
"""Weight files by their content: a quick look at each, and a digest of every byte.

The look (`sampled`) is over before the server starts, however large the model is. The digest
(`Digest`) may take minutes, so a thread of ours makes it, and `Memo` keeps it for the next start.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from attnstore_vllm.config.values import format_size
from attnstore_vllm.identity.file_times import keeps_changes
from attnstore_vllm.own_files import read_own, replace_own

logger = logging.getLogger(__name__)

SAMPLES = 16
SAMPLE_BYTES = 4096
HEAD_BYTES = 64 << 10
"""The start of a file that is read where its header is not known; twice as much is read whole."""
HEADER_BYTES_MAX = 100 << 20
"""safetensors allows no longer ones."""
BUDGET_S = 2.0
"""How long a start waits for a digest: of small models it has come by then."""
READ_BYTES = 4 << 20
THREADS = 2
BYTES_PER_S = 1 << 30
"""The most that all threads read together, once the server runs: its model needs memory bandwidth
too."""
NICE = 10
SETTLED_S = 2.0
"""A file that changed so recently may change again without another time to show for it."""
PROGRESS_S = 60.0
ENTRIES_MAX = 1024
MEMO_BYTES_MAX = 1 << 20
MEMO_NAME = "weights.json"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights, and what it is there for, wherever the model lies."""

    path: Path
    name: str
    """As vLLM sees it from the model's directory: a link's own, not that of what it leads to. With
    the file's place where vLLM goes by that."""
    of: str = "model"
    """Which of an engine's models is loaded from it."""


def sampled(files: Iterable[WeightFile]) -> str:
    """Tells most models apart. Directories and times do not count; names do: they say which file
    wins where a weight is in two, and which ones an index names.

    Cost: the header (of safetensors: names, types, shapes and places of all tensors) and 64 KiB
    of each file, so about 30 MB of the 163 files of a model of 700 GB. Raises OSError.
    """
    return _digest_of((file.of, file.name, _sample(file.path).hex()) for file in files).hex()


def _digest_of(facts: Iterable[tuple[str | int, ...]]) -> bytes:
    """A digest of facts in any order, each whole: none of one file is taken for another's."""
    return blake3(json.dumps(sorted(facts)).encode()).digest()


def _sample(file: Path) -> bytes:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        hasher = blake3(size.to_bytes(8, "little"))
        hasher.update(stream.read(size if size <= 2 * HEAD_BYTES else _head(stream, size)))
        for i in range(SAMPLES if size > 2 * HEAD_BYTES else 0):
            stream.seek(i * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            hasher.update(stream.read(SAMPLE_BYTES))
    return hasher.digest()


def _head(stream: BinaryIO, size: int) -> int:
    """How long the beginning is that says what the file holds."""
    length = int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    is_safetensors = stream.name.endswith(".safetensors") and length <= size - 8
    return 8 + length if is_safetensors and length <= HEADER_BYTES_MAX else HEAD_BYTES


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whether a file is the one that it was. Times may be set; the last one only by its change."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def __str__(self) -> str:
        numbers = (self.device, self.inode, self.size, self.modified_ns, self.changed_ns)
        return ":".join(map(str, numbers))


class Memo:
    """Digests of files that an earlier start has read, in a small file beside the store.

    The caller holds the directory's lock. A damaged file is an empty one.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / MEMO_NAME
        self._digests = self._read()
        self._has_said = False

    def get(self, stamp: Stamp) -> bytes | None:
        found = self._digests.get(str(stamp))
        return None if found is None else bytes.fromhex(found)

    def keep(self, digests: dict[Stamp, bytes]) -> None:
        """Remember these, and the newest of the others. A disk that refuses costs a line."""
        new = {str(stamp): digest.hex() for stamp, digest in digests.items()}
        old = {name: found for name, found in self._digests.items() if name not in new}
        found = dict(list({**old, **new}.items())[-ENTRIES_MAX:])
        if list(found) == list(self._digests):
            return
        self._digests = found
        body = json.dumps(found)
        try:
            whole = f"{blake3(body.encode()).hexdigest()}\n{body}"
            replace_own(self._path, whole.encode(), durable=True)
        except OSError as error:
            if not self._has_said:
                logger.warning("AttnStore cannot remember that it knows the weights: %s", error)
            self._has_said = True

    def _read(self) -> dict[str, str]:
        try:
            digest, _, body = read_own(self._path, MEMO_BYTES_MAX).partition(b"\n")
            found = json.loads(body) if digest == blake3(body).hexdigest().encode() else None
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("AttnStore does not use %s: %s", self._path, error)
            return {}
        if not isinstance(found, dict) or not all(map(_is_digest, found.values())):
            logger.warning("AttnStore does not use %s: it is damaged", self._path)
            return {}
        return found


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


class _Stopped(Exception):
    pass


class Digest:
    """A digest of some files, of every byte and of what each is there for: `value`, once it is
    known.

    Threads of ours make it: at low priority, at a bounded rate, and only what no memo knows. A
    file that cannot be read, or changes meanwhile, leaves it unknown, with one line.

    Args:
        budget_s: how long the constructor waits for it.
    """

    def __init__(
        self,
        files: Sequence[WeightFile],
        memo: Memo,
        *,
        budget_s: float = BUDGET_S,
        bytes_per_s: int = BYTES_PER_S,
    ) -> None:
        self.value: bytes | None = None
        self._memo = memo
        self._budget_s = budget_s
        self._bytes_per_s = bytes_per_s
        self._stop = threading.Event()
        self._over = threading.Event()
        self._lock, self._remembering = threading.Lock(), threading.Lock()
        self._digests: dict[Stamp, bytes] = {}
        self._read_bytes = self._late_bytes = 0
        self._settled_ns = time.time_ns() - int(SETTLED_S * 1e9)
        self._failed = False
        self._begun = self._said = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._files: list[tuple[Path, Stamp]] = []
        self._named = [(file.of, file.name) for file in files]
        self._kept: set[Stamp] = set()
        try:
            self._look([file.path.resolve() for file in files])
        except OSError as error:
            self._files = []
            self._fail(error)
            return
        for stamp in self._kept:
            known = memo.get(stamp)
            if known is not None:
                self._digests[stamp] = known
        left = [entry for entry in self._files if entry[1] not in self._digests]
        self._total_bytes = sum(stamp.size for _, stamp in left)
        self._todo = sorted(left, key=lambda entry: entry[1].size)
        self._left = len(left)
        if not left:
            self._end()
            return
        for i in range(min(THREADS, len(left))):
            name = f"attnstore_weights_{i}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        if not self._over.wait(budget_s):
            logger.info(
                "AttnStore is idle until it has read the weights, %s at %s a second at most: they "
                "are new here. A later start of these files does not read them",
                format_size(self._total_bytes),
                format_size(bytes_per_s),
            )

    def _look(self, files: Sequence[Path]) -> None:
        """Stamp them all, and see which stamps may be remembered. Raises OSError."""
        for file in files:
            found = file.stat()
            stamp = Stamp.of(found)
            self._files.append((file, stamp))
            if keeps_changes(file, found):
                self._kept.add(stamp)
            elif len(self._files) - len(self._kept) == 1:
                logger.warning(
                    "AttnStore reads the weights at each start, since a change of %s may not show "
                    "in its times. Let them lie on a local disk, or change their mode once: "
                    "chmod a-w",
                    file,
                )

    def wait(self, timeout_s: float) -> bool:
        """Until it is known, or never will be. For tests."""
        return self._over.wait(timeout_s)

    def close(self) -> None:
        """End the threads: within one read of 4 MiB each."""
        self._stop.set()
        for thread in self._threads:
            thread.join(1.0)

    def _work(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            buffer = bytearray(READ_BYTES)
            while True:
                with self._lock:
                    if not self._todo:
                        return
                    file, stamp = self._todo.pop()
                digest = self._digest(file, stamp, buffer)
                with self._lock:
                    self._digests[stamp] = digest
                    self._left -= 1
                    is_last = not self._left
                if is_last:
                    self._end()
                else:
                    self._remember(waits=False)
        except _Stopped:
            self._over.set()
        except OSError as error:
            self._fail(error)

    def _digest(self, file: Path, stamp: Stamp, buffer: bytearray) -> bytes:
        hasher = blake3()
        view = memoryview(buffer)
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                hasher.update(view[:count])
                self._pace(count)
            _check(file, Stamp.of(os.fstat(stream.fileno())), stamp)
        _check(file, Stamp.of(file.stat()), stamp)
        return hasher.digest()

    def _pace(self, count: int) -> None:
        """Count what was read, say how far it is, and wait if it went too fast."""
        with self._lock:
            self._read_bytes += count
            now = time.monotonic()
            late_s = now - self._begun - self._budget_s
            if late_s > 0:
                self._late_bytes += count
            wait_s = self._late_bytes / self._bytes_per_s - late_s
            if now > self._said + PROGRESS_S:
                self._said = now
                logger.info(
                    "AttnStore reads the weights, and is idle until then: %s of %s",
                    format_size(self._read_bytes),
                    format_size(self._total_bytes),
                )
        if self._stop.wait(wait_s) if late_s > 0 and wait_s > 0 else self._stop.is_set():
            raise _Stopped

    def _end(self) -> None:
        """All files have been read: is each still the one that was begun with?"""
        try:
            for file, stamp in self._files:
                _check(file, Stamp.of(file.stat()), stamp)
        except OSError as error:
            self._fail(error)
            return
        seconds = time.monotonic() - self._begun
        if self._threads and seconds > self._budget_s:
            logger.info(
                "AttnStore has read the weights in %.0f s, and is in use from now on", seconds
            )
        stamps = [stamp for _, stamp in self._files]
        self.value = _digest_of(
            (*named, stamp.size, self._digests[stamp].hex())
            for named, stamp in zip(self._named, stamps, strict=True)
        )
        self._over.set()
        self._remember()  # a sync: a busy disk takes seconds for it, and nothing need wait

    def _remember(self, *, waits: bool = True) -> None:
        """Remember what is known so far, of files whose changes show and that were not changed just
        before they were read. It syncs, which may take seconds: meanwhile others read on.

        Args:
            waits: for another thread that does so now; else what that one lacks comes later.
        """
        if not self._remembering.acquire(blocking=waits):
            return
        try:
            with self._lock:
                known = {stamp: self._digests[stamp] for stamp in self._kept & self._digests.keys()}
            settled = {s: found for s, found in known.items() if s.changed_ns < self._settled_ns}
            self._memo.keep(settled)
        finally:
            self._remembering.release()

    def _fail(self, error: OSError) -> None:
        self._stop.set()
        with self._lock:
            if not self._failed:
                self._failed = True
                logger.warning(
                    "AttnStore is idle until the next start: the weights cannot be told: %s", error
                )
        self._over.set()


def _check(file: Path, found: Stamp, wanted: Stamp) -> None:
    if found != wanted:
        raise OSError(f"{file} has changed while the server was starting")
