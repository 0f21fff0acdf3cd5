# SPDX-License-Identifier: Apache-2.0
"""The owner's side: says which chunks this engine has, and holds those that a sibling copies.

A sibling maps our pool for reading alone, and copies by itself. A hold ends when it says so, with
its connection, or after HOLD_MAX_S. If a slot gets other bytes while a slow sibling still copies,
the checksum that it was told is not that of its copy, and it drops the copy. So no hold must last.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.peers.wire import Message, MessageKind, Wire, WireError
from attnstore_vllm.types import KEY_BYTES, NVME, TOKEN_BYTES, Key

logger = logging.getLogger(__name__)

HOLD_MAX_S = 1.0
COMING_MAX_S = 0.5
"""How long a sibling's chunk may take to come up from our NVMe."""
HELD_PART = 4
"""Siblings hold one slot in so many at most, all together."""
CONNECTIONS_MAX = 64
GETS_MAX = 1024
POLL_S, WAITING_POLL_S = 0.25, 0.002
PIECE = struct.Struct("<Ii")
"""In answer to a GET: the number of its key, and a slot or one of these. The checksum follows."""
NOT_HERE, COMING = -1, -2
PIECES_BYTES = 16 << 20
"""Bytes of slots that one message tells of, or one slot: a sibling copies them in one go."""
FIND_HEAD = struct.Struct("<III")
"""Whole chunks, tokens of a chunk, tokens from there on that the asker has."""
MOVABLE = struct.Struct("<QI?")
"""In answer to a FIND: a chunk's position, the first token of it whose KV may be moved, and whether
that is exact. The chunk's parent and tokens follow."""
COUNT = struct.Struct("<I")


@dataclass(slots=True, eq=False)
class _Get:
    """Chunks that a sibling has asked to be held."""

    wire: Wire
    number: int
    generation: bytes
    ends_at: float
    held: list[Chunk] = field(default_factory=list)
    coming: dict[int, Chunk] = field(default_factory=dict)


class Owner:
    """Serves siblings on a thread of its own.

    Args:
        listening: the socket; the owner's from now on.
        hello: what siblings must be of: namespace and shape.
        pool: the descriptors of the pool for reading, made anew at each call, and its shape.
        generation: of our KV; None: we share none.
    """

    def __init__(
        self,
        context: Context,
        listening: socket.socket,
        hello: bytes,
        pool: tuple[Callable[[], list[int]], bytes],
        generation: Callable[[], bytes | None],
    ) -> None:
        self._context = context
        self._listening = listening
        self._hello = hello
        self._fds, self._shape = pool
        self._generation = generation
        self._gets: dict[tuple[Wire, int], _Get] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stopping = False
        weakref.finalize(self, os.close, self._wake)
        self._thread = threading.Thread(target=self._run, name="attnstore-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is None:
            self._listening.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._tick()
        except Exception:
            logger.exception("siblings are served no more; the server goes on")
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, Wire):
                    self._end(key.fileobj)
            self._selector.close()
            self._listening.close()

    def _tick(self) -> None:
        is_waiting = any(get.coming for get in self._gets.values())
        for key, _ in self._selector.select(WAITING_POLL_S if is_waiting else POLL_S):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.fileobj, Wire):
                self._serve(key.fileobj)
        now = self._context.clock()
        for get in list(self._gets.values()):
            if (get.wire, get.number) not in self._gets:
                continue  # its connection has just ended
            try:
                self._look_again(get, now)
            except WireError:
                self._end(get.wire)
                continue
            if now >= get.ends_at and not get.coming:
                self._release(get)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        if len(self._selector.get_map()) > CONNECTIONS_MAX:
            connection.close()
            return
        try:
            wire = Wire(connection)
        except WireError as error:
            logger.warning("a connection is refused: %s", error)
            return
        self._selector.register(wire, selectors.EVENT_READ)

    def _end(self, wire: Wire) -> None:
        for get in [get for get in self._gets.values() if get.wire is wire]:
            self._release(get)
        if wire in self._selector.get_map():
            self._selector.unregister(wire)
        wire.close()

    def _serve(self, wire: Wire) -> None:
        try:
            wire.flush()
            for message in wire.receive():
                self._answer(wire, message)
        except (WireError, struct.error, IndexError, ValueError, TypeError, OSError):
            self._end(wire)
            return
        more = selectors.EVENT_WRITE if wire.has_output else 0
        self._selector.modify(wire, selectors.EVENT_READ | more)

    def _answer(self, wire: Wire, message: Message) -> None:
        match message.kind:
            case MessageKind.HELLO:
                if message.fields != [self._hello]:
                    raise WireError("another model, or another version of the store")
                fds = self._fds()
                try:
                    wire.send(MessageKind.WELCOME, 0, [self._shape], fds)
                finally:
                    for fd in fds:
                        os.close(fd)
            case MessageKind.FIND:
                wire.send(MessageKind.FOUND, message.number, self._find(*message.fields))
            case MessageKind.GET:
                self._get(wire, message.number, *message.fields)
            case MessageKind.RELEASE:
                get = self._gets.get((wire, message.number))
                if get is not None:
                    self._release(get)
            case _:
                raise WireError("a message of no known kind")

    # ---- what is here --------------------------------------------------------------------

    def _find(
        self,
        generation: bytes,
        head: bytes,
        parent: bytes,
        domain: bytes,
        keys: bytes,
        tokens: bytes,
        *extras: bytes,
    ) -> list[bytes]:
        """How many of the leading chunks are here; and of the one behind them the chunk with which
        a hit goes farthest: its key and its tokens. For who takes moved KV too, of `domain`, also
        chunks with the tokens behind that."""
        num_keys, size, has = FIND_HEAD.unpack(head)
        named = _cut(keys, num_keys)
        nothing = [COUNT.pack(0)]
        index = self._context.residency.index
        with self._context.progress:  # a reset makes the generation with the lock held
            if generation != self._generation() or size != index.chunk_tokens:
                return nothing
            self._context.residency.now = self._context.clock()
            count = 0
            for entry in index.entries.find_run(named):
                if not self._has(index.chunk(entry)):
                    break
                count += 1
            rest = tokens[count * size * TOKEN_BYTES :][: size * TOKEN_BYTES]
            extra = extras[count] if count < len(extras) else b""
            before = Key(parent) if count == 0 else named[count - 1]
            best = index.best_match(before, extra, rest, 1 if domain else None) if rest else None
            tail, stop = [b"", b""], max(has, count * size)
            if best is not None and self._has(best[0]) and (count or best[1] > has):
                chunk, _, is_exact = best
                if is_exact or chunk.name.tokens:  # else its tokens are on NVMe
                    known = chunk.name.tokens or rest[: chunk.name.num_tokens * TOKEN_BYTES]
                    tail = [chunk.name.key, known]
                    stop = max(stop, count * size + _num_equal(known, rest))
            found = [COUNT.pack(count), *tail]
            if domain:
                for name, _, *how in self._context.moved.movable(
                    Key(domain), tokens, stop, self._has
                ):
                    found += [MOVABLE.pack(name.position, *how), name.parent, name.tokens]
            return found

    def _has(self, chunk: Chunk) -> bool:
        """Locked. Whether it is here, or comes up from our own disk. What we know of others by
        asking alone is theirs to tell, and what ends sooner than the server's ttl is told to none:
        they would not know of its end. Nor is what is on trial."""
        context = self._context
        if not chunk.usable or context.residency.has_expired(chunk):
            return False
        if context.residency.is_on_trial(chunk):
            return False
        lease = context.residency.run_of(chunk).lease if context.has_leases else None
        if lease is not None and (context.ttl_s is None or lease.ttl_s < context.ttl_s):
            return False
        if chunk.dram.state in (State.READY, State.READING):
            return True
        source = context.reader.source(chunk)
        return source is not None and source.tier.name == NVME

    # ---- holds ---------------------------------------------------------------------------

    def _get(self, wire: Wire, number: int, generation: bytes, keys: bytes) -> None:
        if (wire, number) in self._gets or len(self._gets) >= GETS_MAX:
            raise WireError("a number is used twice, or too many are")
        named = _cut(keys, len(keys) // KEY_BYTES)
        get = _Get(wire, number, generation, self._context.clock() + HOLD_MAX_S)
        self._gets[wire, number] = get
        held: dict[int, Chunk] = {}
        missing = []
        with self._context.progress:
            self._context.residency.now = self._context.clock()
            is_ours = generation == self._generation()
            for place, key in enumerate(named):
                chunk = self._hold(get, key) if is_ours else None
                if chunk is None:
                    missing.append(place)
                elif chunk.dram.state is State.READY:
                    held[place] = chunk
                else:
                    get.coming[place] = chunk
        if get.coming:
            get.ends_at = self._context.clock() + COMING_MAX_S
            self._context.reader.start()
        self._say_where(get, held)
        self._say_instead(get, NOT_HERE, missing)
        self._say_instead(get, COMING, list(get.coming))

    def _hold(self, get: _Get, key: Key) -> Chunk | None:
        """Locked. Hold the chunk, or have it come up. None: it is not here."""
        context = self._context
        residency = context.residency
        chunk = residency.index.get(key)
        num_held = sum(len(g.held) + len(g.coming) for g in self._gets.values())
        limit = max(1, context.pool.num_slots // HELD_PART)
        if chunk is None or num_held >= limit or not self._has(chunk):
            return None
        if chunk.dram.state is State.READY:
            residency.hold(chunk)
            get.held.append(chunk)
        elif chunk.dram.state is State.ABSENT:
            context.reader.want([chunk])
        return chunk

    def _say_where(self, get: _Get, held: dict[int, Chunk]) -> None:
        """The chunks are held: their bytes do not change while their checksums are taken."""
        pool, fields = self._context.pool, list[bytes]()
        for place, chunk in held.items():
            copy = chunk.dram
            copy.checksum = copy.checksum or checksum(pool.slot(copy.slot))
            fields += [PIECE.pack(place, copy.slot), copy.checksum]
            if len(fields) // 2 * pool.slot_bytes >= PIECES_BYTES:
                get.wire.send(MessageKind.PIECES, get.number, fields)
                fields = []
        if fields:
            get.wire.send(MessageKind.PIECES, get.number, fields)

    def _say_instead(self, get: _Get, what: int, places: Sequence[int]) -> None:
        if places:
            fields = [field for place in places for field in (PIECE.pack(place, what), b"")]
            get.wire.send(MessageKind.PIECES, get.number, fields)

    def _look_again(self, get: _Get, now: float) -> None:
        """Chunks that were to come up may have come."""
        come: dict[int, Chunk] = {}
        gone = []
        with self._context.progress:
            self._context.residency.now = now
            for place, chunk in get.coming.items():
                has_come = chunk.dram.state is State.READY and not chunk.dropped
                if has_come and self._has(chunk):  # it may have come from a tier that is on trial
                    self._context.residency.hold(chunk)
                    get.held.append(chunk)
                    come[place] = chunk
                elif has_come or chunk.dropped or now >= get.ends_at:
                    gone.append(place)
        for place in (*come, *gone):
            del get.coming[place]
        if come:
            get.ends_at = now + HOLD_MAX_S
            self._say_where(get, come)
        self._say_instead(get, NOT_HERE, gone)

    def _release(self, get: _Get) -> None:
        del self._gets[get.wire, get.number]
        with self._context.progress:
            self._context.residency.release(*get.held)
        self._context.wake()  # a read may have waited for the room


def _num_equal(tokens: bytes, others: bytes) -> int:
    """Leading tokens that are the same."""
    one, two = np.frombuffer(tokens, ">u4"), np.frombuffer(others, ">u4")
    count = min(len(one), len(two))
    different = np.flatnonzero(one[:count] != two[:count])
    return int(different[0]) if len(different) else count


def _cut(keys: bytes, count: int) -> list[Key]:
    if len(keys) != count * KEY_BYTES:
        raise WireError("keys of a wrong length")
    return [Key(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
