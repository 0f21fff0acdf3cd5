# SPDX-License-Identifier: Apache-2.0
"""The asker's side: siblings as a remote tier (tiers/remote_io.py).

It is long since one thread does all that is asked, copied and verified.

    FIND -> FOUND    which of these chunks have you?            to all siblings, once a request
    GET  -> PIECES   hold these, and say where they are
                     copy from the sibling's pool, take the copies' checksums, compare
    RELEASE

One thread sends, receives, copies and verifies. A sibling that does not answer in time is asked
less and less often (policy/breaker.py), and a request that waited for it computes.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError, GoneError
from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.index.moved import Movable
from attnstore_vllm.io.checksum import copy_checksums
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.noted_reset import NotedReset
from attnstore_vllm.tiers.peers.generation import Generation
from attnstore_vllm.tiers.peers.owner import (
    COMING,
    COUNT,
    FIND_HEAD,
    MOVABLE,
    NOT_HERE,
    PIECE,
    Owner,
)
from attnstore_vllm.tiers.peers.peers_tier import PeersTier
from attnstore_vllm.tiers.peers.sibling import Sibling
from attnstore_vllm.tiers.peers.wire import Message, MessageKind, WireError
from attnstore_vllm.tiers.remote import Ask, Found
from attnstore_vllm.tiers.remote_io import RemoteIo
from attnstore_vllm.tiers.tier_io import Loaded, Stored
from attnstore_vllm.transfer.page_tables import PAUSE_S, Unmapped
from attnstore_vllm.types import KEY_BYTES, TOKEN_BYTES, Flow, Key

logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 0.02
ANSWER_MARGIN = 0.75
"""Siblings have this part of it: what has come by then is the answer."""
PIECE_DEADLINE_S, COMING_DEADLINE_S = 0.1, 0.6
"""How long a load waits for a sibling to say where a chunk is, and for one that comes up there."""
LEASE_S = 5.0
CONNECT_EVERY_S = 0.5
DEPTH = 32
"""Loads at a time."""
FIND_TOKENS_MAX = 1 << 18
"""Tokens of one question."""
POSITION_MAX = 1 << 30
"""The highest position that a chunk of a sibling may begin at."""


_GONE = GoneError("a sibling has not said in time where it is")


@dataclass(slots=True, eq=False)
class _Question:
    ask: Ask
    ends_at: float
    waits_for: set[Sibling] = field(default_factory=set)
    best: list[Found] = field(default_factory=list)
    whose: Sibling | None = None


@dataclass(slots=True, eq=False)
class _PeerLoad:
    chunk: Chunk
    payload: memoryview
    done: Loaded
    begun_at: float
    sibling: Sibling | None = None
    ends_at: float = 0.0


class PeersIo(RemoteIo):
    """See the module.

    Args:
        siblings: all other engines of the group.
        generation: of our KV.
        listening, hello, pool: see Owner.
        own_pages: of our pool.
    """

    answer_deadline_s = ANSWER_DEADLINE_S
    piece_deadline_s = PIECE_DEADLINE_S
    lease_s = LEASE_S
    loads_soon = True
    flow_up = Flow.FROM_PEERS
    num_storing = 0
    can_store = False

    def __init__(
        self,
        context: Context,
        tier: PeersTier,
        siblings: Sequence[Sibling],
        generation: Generation,
        listening: socket.socket,
        hello: bytes,
        pool: tuple[Callable[[], list[int]], bytes],
        own_pages: Unmapped,
    ) -> None:
        super().__init__(context, tier)
        self.record_bytes = context.pool.slot_bytes
        counts = context.residency.counts
        self.health = Health(tier.name, "siblings", context.progress, counts, context.clock)
        self.siblings = siblings
        self._own_pages = own_pages
        self._mapped_first = 0
        self._of = generation
        self._advancing = threading.Lock()
        self._num_resets = 0
        """Resets whose generation is not on the disk yet."""
        self._last_reset = self._last_left = 0
        """The last one's number, and that of the last one that gave up."""
        self._owner = Owner(context, listening, hello, pool, self.generation)
        self._asks: deque[Ask] = deque()
        self._begun: deque[_PeerLoad] = deque()
        self._num_loading = 0
        self._where: OrderedDict[Key, Sibling] = OrderedDict()
        self._questions: dict[int, _Question] = {}
        self._loads: dict[int, dict[int, _PeerLoad]] = {}
        """By the number of the GET, and of the key in it."""
        self._last_number = 0
        self._may_send = False
        """Our thread is where it can send GETs at once: before it tells who waits for them."""
        self._connect_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stopping = False
        weakref.finalize(self, os.close, self._wake)
        self._thread = threading.Thread(target=self._run, name="attnstore-peers", daemon=True)

    def tick(self) -> None:
        super().tick()
        if self._thread.ident is None and not self._stopping:  # the store is made by now
            self._owner.start()
            self._thread.start()

    # ---- TierIo --------------------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        return self._num_loading

    @property
    def can_load(self) -> bool:
        return self._num_loading < DEPTH

    def ask(self, ask: Ask) -> None:
        self._asks.append(ask)
        os.eventfd_write(self._wake, 1)

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        self._num_loading += 1
        self._begun.append(_PeerLoad(chunk, payload, done, self.context.clock()))

    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        raise NotImplementedError("what siblings keep they have computed")

    def submit(self) -> None:
        if self._may_send and threading.get_ident() == self._thread.ident:
            self._may_send = False  # what fails meanwhile is none of this tick's
            self._send_gets(self.context.clock())
        else:
            os.eventfd_write(self._wake, 1)

    def gauges_now(self) -> dict[tuple[str, str], float]:
        ready = sum(s.is_ready and s.breaker.in_use for s in self.siblings)
        return {("siblings", "ready"): float(ready), ("siblings", "all"): float(len(self.siblings))}

    def reset(self) -> NotedReset:
        """We share nothing until the next generation is on the disk."""
        self.forget_asks()
        self._num_resets += 1
        self._last_reset = number = self._last_reset + 1
        note, give_up = partial(self._advance, number), partial(self._keep_to_itself, number)
        return NotedReset(self.context, "siblings", note, give_up)

    def _keep_to_itself(self, number: int) -> None:
        """Locked. Until the next reset, or a restart, which is of the generation of before."""
        self._of.leave()
        self._last_left = max(self._last_left, number)
        self._num_resets -= 1

    def _advance(self, number: int) -> None:
        try:
            with self._advancing:  # one for each: others may have taken one
                self._of.advance()
        finally:
            with self.context.progress:
                if self._last_left > number:  # a later one gave up while this one was noted
                    self._of.leave()
                self._num_resets -= 1

    def generation(self) -> bytes | None:
        """None: we share nothing."""
        return self._of.value if not (self._num_resets or self.has_left) else None

    def cancel(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        else:
            self._own_pages.forget()
        return self._owner.close(timeout_s) and not self._thread.is_alive()

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._tick()
        except Exception:
            logger.exception("siblings are asked no more; the server goes on")
            with self.context.progress:
                self.health.end()
        finally:
            self._end([load for loads in self._loads.values() for load in loads.values()])
            self._end(list(self._begun))
            self._own_pages.forget()
            for sibling in self.siblings:
                sibling.close()
            self._selector.close()

    def _tick(self) -> None:
        now = self.context.clock()
        ends = [question.ends_at for question in self._questions.values()]
        ends += [load.ends_at for loads in self._loads.values() for load in loads.values()]
        timeout = max(0.0, min([now + CONNECT_EVERY_S, *ends]) - now)
        if not ends and any(unmapped.map_some() for unmapped in self._unmapped()):
            timeout = PAUSE_S
        for key, _ in self._selector.select(timeout):
            if key.fileobj == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._receive(key.data)
        now = self.context.clock()
        if now >= self._connect_at:
            self._connect_at = now + CONNECT_EVERY_S
            self._connect()
        while self._asks:
            self._find(self._asks.popleft(), now)
        self._send_gets(now)
        for key, _ in self._selector.select(0):  # copies take their time: it is not a sibling's
            if key.fileobj != self._wake:
                self._receive(key.data)
        self._end_late(now)

    def _unmapped(self) -> Iterable[Unmapped]:
        """Pages that the first copies from siblings would wait for: they are read in theirs and
        written to ours, which other threads may or may not have mapped. Another is first each
        time: a copy needs pages of two of them."""
        of = [self._own_pages, *(s.pool.unmapped for s in self.siblings if s.pool is not None)]
        self._mapped_first = (self._mapped_first + 1) % len(of)
        return of[self._mapped_first :] + of[: self._mapped_first]

    def _connect(self) -> None:
        for sibling in self.siblings:
            if sibling.wire is None and sibling.connect() and sibling.wire is not None:
                self._selector.register(sibling.wire, selectors.EVENT_READ, sibling)

    def _part(self, sibling: Sibling, why: object) -> None:
        """The sibling has gone, or is none of ours: all that was asked of it fails."""
        if sibling.is_ready:
            logger.warning("%s is asked no more for now: %s", sibling.directory, why)
        if sibling.wire is not None:
            self._selector.unregister(sibling.wire)
        sibling.close()
        for number, question in list(self._questions.items()):
            self._heard(number, question, sibling)
        for number, loads in list(self._loads.items()):
            theirs = [place for place, load in loads.items() if load.sibling is sibling]
            self._end([loads.pop(place) for place in theirs])
            if not loads:
                del self._loads[number]

    def _send(
        self, sibling: Sibling, kind: MessageKind, number: int, fields: Sequence[bytes]
    ) -> bool:
        assert sibling.wire is not None
        try:
            sibling.wire.send(kind, number, fields)
        except WireError as error:
            self._part(sibling, error)
            return False
        self._watch(sibling)
        return True

    def _watch(self, sibling: Sibling) -> None:
        if sibling.wire is not None:
            more = selectors.EVENT_WRITE if sibling.wire.has_output else 0
            self._selector.modify(sibling.wire, selectors.EVENT_READ | more, sibling)

    def _receive(self, sibling: Sibling) -> None:
        wire = sibling.wire
        if wire is None:
            return
        try:
            wire.flush()
            for message in wire.receive():
                match message.kind:
                    case MessageKind.WELCOME:
                        sibling.welcome(message)
                    case MessageKind.FOUND:
                        self._may_send = True
                        self.on_found(sibling, message)
                    case MessageKind.PIECES:
                        self._pieces(sibling, message)
                    case _:
                        raise WireError("a message of no known kind")
        except (WireError, OSError, struct.error, IndexError, ValueError, TypeError) as error:
            self._may_send = False
            self._part(sibling, error)
            return
        self._may_send = False
        self._watch(sibling)

    # ---- questions -----------------------------------------------------------------------

    def _find(self, ask: Ask, now: float) -> None:
        generation = self.generation()
        question = _Question(ask, ask.asked_at + ANSWER_MARGIN * self.answer_deadline_s)
        number = self._next_number()
        self._questions[number] = question
        for sibling in self.siblings:
            if generation is None or not sibling.is_ready:
                continue
            is_probe = sibling.breaker.take_probe(now)
            if not (sibling.breaker.in_use or is_probe):
                continue
            question.waits_for.add(sibling)
        if question.waits_for and generation is not None:
            fields = _fields_of(ask, generation)
            for sibling in list(question.waits_for):
                if not self._send(sibling, MessageKind.FIND, number, fields):
                    question.waits_for.discard(sibling)
        if not question.waits_for:
            self._answer(number, question)

    def on_found(self, sibling: Sibling, message: Message) -> None:
        sibling.breaker.success()  # also when it is late
        question = self._questions.get(message.number)
        if question is None or sibling not in question.waits_for:
            return
        (count,) = COUNT.unpack(message.fields[0])
        ask = question.ask
        found = [Found(ask.name(number)) for number in range(min(count, len(ask.keys)))]
        if len(message.fields) >= 3:
            found += _tail(ask, count, *message.fields[1:3])
            found += movable_of(ask, message.fields[3:])
        if length_of(found) > length_of(question.best):
            question.best, question.whose = found, sibling
        self._heard(message.number, question, sibling)

    def _heard(self, number: int, question: _Question, sibling: Sibling) -> None:
        """The sibling has answered, or never will."""
        question.waits_for.discard(sibling)
        if not question.waits_for:
            self._answer(number, question)

    def _answer(self, number: int, question: _Question) -> None:
        if self._questions.pop(number, None) is None:
            return
        for found in question.best:
            assert question.whose is not None
            self._where[found.name.key] = question.whose
            self._where.move_to_end(found.name.key)
        while len(self._where) > self.tier.num_slots:
            self._where.popitem(last=False)
        self.answer(question.ask, question.best)

    # ---- loads ---------------------------------------------------------------------------

    def _send_gets(self, now: float) -> None:
        batches: dict[Sibling, dict[int, _PeerLoad]] = {}
        lost = []
        while self._begun:
            load = self._begun.popleft()
            sibling = self._where.get(load.chunk.name.key)
            if sibling is None or not (sibling.is_ready and sibling.breaker.in_use):
                lost.append(load)
                continue
            load.sibling, load.ends_at = sibling, now + self.piece_deadline_s
            batch = batches.setdefault(sibling, {})
            batch[len(batch)] = load
        # All are known before the first is sent: in all failures each has its deadline.
        numbered = [(self._next_number(), sibling, batch) for sibling, batch in batches.items()]
        self._loads |= {number: batch for number, _, batch in numbered}
        self._end(lost)
        generation = self.generation() or b""
        for number, sibling, batch in numbered:
            keys = b"".join(load.chunk.name.key for load in batch.values())
            if sibling.is_ready:
                self._send(sibling, MessageKind.GET, number, [generation, keys])
            else:
                self._part(sibling, "it has gone")

    def _pieces(self, sibling: Sibling, message: Message) -> None:
        """Copy and verify. A checksum is that of our copy: no other can write to it now."""
        loads = self._loads.get(message.number, {})
        copies, ended = [], list[tuple[int, AttnStoreError | None]]()
        places = [PIECE.unpack(said)[0] for said in message.fields[::2]]
        if len(set(places)) < len(places):  # two slots in one place: one digest is of the other
            raise WireError("a chunk is told twice")
        for said, expected in zip(message.fields[::2], message.fields[1::2], strict=True):
            place, slot = PIECE.unpack(said)
            load = loads.get(place)
            if load is None or load.sibling is not sibling:
                continue  # it was given up
            if slot == COMING:
                load.ends_at = self.context.clock() + COMING_DEADLINE_S
            elif slot == NOT_HERE:
                ended.append((place, GoneError("a sibling has dropped it")))
            elif sibling.pool is None or not 0 <= slot < sibling.pool.num_slots:
                ended.append((place, GoneError("a sibling names no slot")))
            else:
                copies.append((place, slot, expected, (load.payload, sibling.pool.parts(slot))))
        digests = copy_checksums([copy for *_, copy in copies])
        for (place, slot, expected, _), digest in zip(copies, digests, strict=True):
            where = f"{sibling.directory}, slot {slot}"
            is_right = digest == expected
            failure = CorruptRecordError(where, "payload", expected.hex(), digest.hex())
            ended.append((place, None if is_right else failure))
        if not ended:
            return
        self._end_each([(loads.pop(place), failure) for place, failure in ended])
        if not loads:
            del self._loads[message.number]
            self._send(sibling, MessageKind.RELEASE, message.number, [])
        self.context.wake()  # last: the store's thread is not to come before who waits for these

    def _end(self, loads: Sequence[_PeerLoad]) -> None:
        """Tell who waits for them that they do not come."""
        self._end_each([(load, _GONE) for load in loads])
        if loads:
            self.context.wake()

    def _end_each(self, ended: Sequence[tuple[_PeerLoad, AttnStoreError | None]]) -> None:
        if not ended:
            return
        with self.context.progress:
            self._num_loading -= len(ended)
            self.context.residency.now = now = self.context.clock()
            begun_at = max(self.load_ended_at, min(load.begun_at for load, _ in ended))
            for load, failure in ended:  # they came together: each took its part of the time
                self.load_ended_at = now - (now - begun_at) / len(ended)
                load.done(failure, load.chunk.name.tokens)
        for _, failure in ended:
            if not isinstance(failure, GoneError):
                self.health.note_read(failure)

    def _end_late(self, now: float) -> None:
        for number, question in list(self._questions.items()):
            if now >= question.ends_at:
                for sibling in question.waits_for:
                    sibling.breaker.failure(now)
                self._answer(number, question)
        for number, loads in list(self._loads.items()):
            late = [place for place, load in loads.items() if now >= load.ends_at]
            for place in late:
                load = loads.pop(place)
                assert load.sibling is not None
                load.sibling.breaker.failure(now)
                self._end([load])
            if late and not loads:
                del self._loads[number]

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number


def _fields_of(ask: Ask, generation: bytes) -> list[bytes]:
    """A FIND. The tokens go along since it is not known in which chunk a sibling's run ends."""
    size = ask.sequence.chunk_tokens
    start = ask.first * size
    stop = min(ask.stop, start + FIND_TOKENS_MAX)
    keys = ask.keys[: FIND_TOKENS_MAX // size]
    count = len(keys) + 1
    extras = [ask.sequence.extra(ask.first + number) for number in range(count)]
    return [
        generation,
        FIND_HEAD.pack(len(keys), size, ask.at - start),
        ask.sequence.parent(ask.first),
        ask.sequence.root if ask.finds_moved else b"",
        b"".join(keys),
        ask.sequence.tokens(start, stop),
        *(extras if any(extras) else ()),
    ]


def _tail(ask: Ask, count: int, key: bytes, tokens: bytes) -> list[Found]:
    """The chunk that a sibling has behind the whole ones, if it is what its name says."""
    size = ask.sequence.chunk_tokens
    if count > len(ask.keys) or not 0 < len(tokens) <= size * TOKEN_BYTES:
        return []
    parent, extra, _ = ask.part(count)
    if len(tokens) % TOKEN_BYTES or chunk_key(parent, extra, tokens) != key:
        return []
    position = (ask.first + count) * size
    num_tokens = len(tokens) // TOKEN_BYTES
    return [Found(ChunkName(Key(key), parent, extra, ask.tenant, position, num_tokens, tokens))]


def movable_of(ask: Ask, fields: Sequence[bytes]) -> list[Found]:
    """Chunks that have the prompt's tokens at another place, if they are what their names say."""
    found = []
    size, root = ask.sequence.chunk_tokens, ask.sequence.root
    for head, parent, tokens in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        position, native_from, is_exact = MOVABLE.unpack(head)
        num_tokens, rest = divmod(len(tokens), TOKEN_BYTES)
        is_sized = not rest and 0 <= native_from < num_tokens <= size
        if not is_sized or len(parent) != KEY_BYTES or position % size or position > POSITION_MAX:
            raise WireError("a chunk that cannot be")
        key = chunk_key(Key(parent), b"", tokens)
        name = ChunkName(key, Key(parent), b"", ask.tenant, position, num_tokens, tokens)
        found.append(Found(name, movable=Movable(name, root, native_from, is_exact)))
    return found if ask.finds_moved else []


def length_of(found: Sequence[Found]) -> tuple[int, int]:
    """Tokens of chunks in their place, and of others. Moved KV is for where there is no better."""
    moved = [one.movable for one in found if one.movable is not None]
    in_place = sum(one.name.num_tokens for one in found if one.movable is None)
    return in_place, sum(one.name.num_tokens - one.native_from for one in moved)
