# SPDX-License-Identifier: Apache-2.0
"""A recorder of what requests wanted: a trace for `attnstore simulate` and `plan`.

    requests.jsonl   a request a line: its time, its lengths, a hash for each chunk. No token.
    machine.yaml     the server's sizes, and its speeds as they were measured

A chunk's hash is keyed with a secret of this run, so that guesses cannot be tried of a prompt on
the file. A conversation goes on inside the chunk in which its last request ended: so the hash of an
end is kept as that of the chunk which continues it, and a request is recorded if the one that it
continues was.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3

from attnstore_vllm.config.settings import TraceConfig
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.own_files import make_directory, open_own, replace_own
from attnstore_vllm.scheduler.observed import Watched
from attnstore_vllm.scheduler.request import RequestState, list_of
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.types import TOKEN_BYTES, Key

logger = logging.getLogger(__name__)

REQUESTS, BEFORE, MACHINE = "requests.jsonl", "requests.before.jsonl", "machine.yaml"
ENDS_MAX = 1 << 16
"""Ends of conversations that are known; beyond, the oldest is forgotten, and begins anew."""
MACHINE_EVERY_NS = 60_000_000_000
Settings = dict[str, int | float | bool]
"""Keys and values of a machine file."""


class _End(NamedTuple):
    """The end of a request, inside a chunk."""

    name: int
    is_recorded: bool
    parent: Key
    num_bytes: int


class Ends:
    """Where requests have ended, so that what continues one is known by it.

    Args:
        key: 32 secret bytes.
    """

    def __init__(self, key: bytes, most: int = ENDS_MAX) -> None:
        self._key = key
        self._most = most
        self._ends: dict[bytes, _End] = {}
        self.lengths: dict[Key, Counter[int]] = {}
        """How many ends continue a chunk, by their bytes of tokens."""

    def __len__(self) -> int:
        return len(self._ends)

    def hash(self, parent: Key, extra: bytes, tokens: bytes) -> bytes:
        return blake3(parent + extra + tokens, key=self._key).digest()

    def name(self, parent: Key, extra: bytes, tokens: bytes) -> int:
        """A chunk's number in the trace, if it continues no end."""
        return int.from_bytes(self.hash(parent, extra, tokens)[:8], "big") >> 1

    def before(self, parent: Key, extra: bytes, tokens: bytes) -> _End | None:
        """The longest end that a chunk begins with. Cost: a hash for each length that there is."""
        for length in sorted(self.lengths.get(parent, ()), reverse=True):
            if length <= len(tokens):
                end = self._ends.get(self.hash(parent, extra, tokens[:length]))
                if end is not None:
                    return end
        return None

    def add(
        self, name: int, parent: Key, extra: bytes, tokens: bytes, *, is_recorded: bool
    ) -> None:
        found = self.hash(parent, extra, tokens)
        if self._ends.pop(found, None) is None:
            self.lengths.setdefault(parent, Counter())[len(tokens)] += 1
        self._ends[found] = _End(name, is_recorded, parent, len(tokens))
        if len(self._ends) > self._most:
            oldest = self._ends.pop(next(iter(self._ends)))
            lengths = self.lengths[oldest.parent]
            lengths[oldest.num_bytes] -= 1
            if not lengths[oldest.num_bytes]:
                del lengths[oldest.num_bytes]
            if not lengths:
                del self.lengths[oldest.parent]


class Recorder:
    """A watcher that writes requests to the directory of `trace`. What fails ends the trace, with
    one warning: one with holes would say what was not so.

    Args:
        sizes: of the server, for the machine file.
        draw: a number from 0 to 1, for conversations that begin.
    Raises: ConfigError if nothing can be written there.
    """

    def __init__(
        self,
        config: TraceConfig,
        chunk_tokens: int,
        sizes: Settings,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._sizes = sizes
        self._scheduler: Scheduler | None = None
        self._draw = draw
        self._ends = Ends(secrets.token_bytes(32))
        self._began_ns: int | None = None
        self._machine_at = 0
        self._size = 0
        path = config.path / REQUESTS
        try:
            make_directory(config.path)
            with suppress(FileNotFoundError):
                path.replace(config.path / BEFORE)
            self._file = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise ConfigError(f"trace.path: {path} cannot be written: {error}") from error
        self._write({"attnstore_trace": 1, "block_tokens": chunk_tokens, "sample": config.sample})

    def begin(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def ended(self, seen: Watched) -> None:
        if self._file < 0:
            return
        if self._began_ns is None:
            self._began_ns = seen.start_ns
        state = seen.state
        if state.adapter is not None and not state.request.resumable:
            entry = self._entry(seen, max(0, seen.start_ns - self._began_ns))
            if entry is not None:
                self._write(entry)
        if seen.end_ns - self._machine_at >= MACHINE_EVERY_NS:
            self._machine_at = seen.end_ns
            self._write_machine()

    def _entry(self, seen: Watched, since_ns: int) -> dict[str, object] | None:
        """None: its conversation is not in the sample."""
        request = seen.state.request
        sequence = _sequence(seen.state)
        known, names, is_recorded = len(request.all_token_ids), [], None
        for number in range(-(-known // sequence.chunk_tokens)):
            parent, extra, tokens = sequence.part(number, known)
            end = self._ends.before(parent, extra, tokens)
            if end is None:
                names.append(self._ends.name(parent, extra, tokens))
            else:
                names.append(end.name)
                is_recorded = end.is_recorded
        if is_recorded is None:
            is_recorded = self._draw() < self._config.sample
        if len(tokens) < sequence.chunk_tokens * TOKEN_BYTES:
            self._ends.add(names[-1], parent, extra, tokens, is_recorded=is_recorded)
        return {
            "timestamp": since_ns // 1_000_000,
            "input_length": request.num_prompt_tokens,
            "output_length": known - request.num_prompt_tokens,
            "known_length": known,
            "hash_ids": names,
        } if is_recorded else None  # fmt: skip

    def _write(self, entry: Mapping[str, object]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if self._size + len(line) > self._config.size_bytes:
            self._stop(f"it has {format_size(self._config.size_bytes)} (trace.size)")
            return
        try:
            written = os.pwrite(self._file, line, self._size)
            if written < len(line):
                os.ftruncate(self._file, self._size)
                self._stop("the disk is full")
            self._size += len(line)
        except OSError as error:
            self._stop(str(error))

    def _write_machine(self) -> None:
        measured = self._measured()
        if measured is None:
            return
        settings = self._sizes | measured
        try:
            replace_own(self._config.path / MACHINE, "".join(machine_lines(settings)).encode())
        except OSError as error:
            self._stop(str(error))

    def _measured(self) -> Settings | None:
        """None as long as too little is known."""
        costs = self._scheduler.costs.measured() if self._scheduler is not None else None
        if self._scheduler is None or costs is None:
            return None
        geometry = self._scheduler.geometry
        bandwidth = costs.pop("rank_bandwidth", None)
        found: Settings = dict(costs)
        if bandwidth is not None:
            found["hbm_bandwidth"] = round(bandwidth * (geometry.num_ranks // geometry.replicas))
        speeds = self._scheduler.store.disk_speeds()
        return found | {f"nvme_{way}": round(speed) for way, speed in speeds.items()}

    def _stop(self, why: str) -> None:
        logger.warning("the trace in %s ends here: %s", self._config.path, why)
        os.close(self._file)
        self._file = -1

    def close(self) -> None:
        if self._file >= 0:
            self._write_machine()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _sequence(state: RequestState) -> SequenceKeys:
    """Its keys, as those of a request that has no moved KV. Its own belong to the scheduler's
    thread, which may still save a rest of it."""
    tokens = list_of(state.request.all_token_ids)
    return SequenceKeys(state.root, tokens, state.chunk_tokens, state.media.spans)


def machine_lines(settings: Mapping[str, int | float | bool]) -> Iterator[str]:
    """A machine file, as docs/simulate.md describes it."""
    yield "# Written by a server: its own sizes and speeds. What is missing was not measured.\n"
    for name, value in settings.items():
        shown = json.dumps(value) if isinstance(value, int) else f"{value:.12f}"
        yield f"{name}: {shown}\n"
