# SPDX-License-Identifier: Apache-2.0
"""Random histories of a store with times to live: nothing renews a lease but a use of that KV.

It is long since the oracle and what is played are read side by side.

Goal: KV that no request has used for its ttl is neither found nor wanted, and nothing but a use of
it has renewed it: no save, tail, prefetch, restart or end of another request.
Method: each history plays requests that share beginnings, answers and tails, in any order and at
any time. The Oracle knows each chunk's last use by what requests did, and asks the store nothing.
After each step no lease in the store may end later than the oracle says, be it found or not: so a
fault is seen when it is made. Leases may end earlier (docs/faults.md says when, each a loss).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.sessions import RUNS_MAX
from attnstore_vllm.policy.visits import NO_TERMS, Run, Terms, Visit
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.types import Key
from tests.helpers import (
    CHUNK_TOKENS,
    GRAIN,
    Rig,
    format_device,
    found_slab,
    name_of,
    new_slab,
    sequence_of,
    slab_bytes,
)

STEPS = 60
TOKENS_MAX = 5 * CHUNK_TOKENS
TTLS_S: list[list[float | None]] = [[None], [20.0], [60.0], [None, 20.0, 60.0, 200.0]]
EVICTIONS = ["attnstore", "lru", "fifo"]
PRIORITIES = [Priority.NORMAL, Priority.NORMAL, Priority.LOW, Priority.HIGH]
SESSIONS = ["a", "b"]
REST_S = 30.0
"""A rest is saved so long after its request's end (scheduler/rests.py)."""
WEIGHTS = {
    "arrive": 6,
    "look_again": 2,
    "begin": 3,
    "prefetch": 1,
    "save": 10,
    "save_rest": 2,
    "finish_saves": 1,
    "end": 3,
    "wait": 5,
    "tick": 5,
    "restart": 0.5,
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Kept:
    """Up to when a chunk may be found at the latest, and the longest ttl of all who used it."""

    ends: float
    ttl_s: float
    by: Request | None
    """Who used it last. None: a prefetch."""

    def renew(self, now: float, ttl_s: float) -> None:
        self.ttl_s = max(self.ttl_s, ttl_s)
        self.ends = max(self.ends, now + self.ttl_s)


@dataclass(eq=False)
class Request:
    number: int
    tokens: list[int]
    """Its prompt, and its answer."""
    num_prompt: int
    ttl_s: float
    """The shorter one of its own and the server's; infinite: none."""
    lookup: Lookup
    since: float
    visit: Visit = field(init=False)
    used: dict[Key, float] = field(default_factory=dict)
    """Chunks that it has found or computed, and for how long they are kept by it."""
    wants: set[Key] = field(default_factory=set)
    """While it waits: what it found at its last look."""
    terms: Terms = NO_TERMS
    is_window: bool = False
    """No group has all tokens."""
    shares: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By the number of a chunk of the spine that it has found: how long, and up to when, all who
    used that have it kept."""
    next_save: int = 0
    ended_at: float = math.inf

    @property
    def id(self) -> str:
        return f"request-{self.number}"

    def shared(self, number: int) -> tuple[float, float]:
        """For how long, and up to when, it may have its chunk of this number kept. What it found
        behind a window it has not looked at before it."""
        if number not in self.shares and number < min(self.shares, default=0):
            number = min(self.shares)
        return self.shares.get(number, (self.ttl_s, 0.0))

    def kept_by(self, name: ChunkName, group: int) -> tuple[float, float]:
        """The same of a chunk that it saves. What it saves of a group beside the spine is of tokens
        that others may have in the spine alone: it is kept as long as those."""
        ttl_s = self.used.get(name.key, self.ttl_s)
        if group == 0 and not self.is_window:
            return ttl_s, 0.0
        of_tokens_s, end = self.shared(name.position // CHUNK_TOKENS)
        return max(ttl_s, of_tokens_s), end

    def names(self) -> list[ChunkName]:
        sequence = sequence_of(self.tokens)
        count = -(-len(self.tokens) // CHUNK_TOKENS)
        return [name_of(sequence, number) for number in range(count)]


class Oracle:
    """Until when each chunk may be found, by what requests did and by the documents alone: a use
    begins the ttl anew, what others share has the longest ttl of its users, none is longer than
    the server's, and what a waiting request has found stays while it waits.

    Args:
        moves: who uses a chunk is the one that uses it on, as it runs. False: all that used it are
            (fifo, where it stays where it was filled).
    """

    def __init__(self, *, moves: bool) -> None:
        self.kept: dict[Key, Kept] = {}
        self.waiting: list[Request] = []
        self._moves = moves

    def is_alive(self, key: Key, now: float) -> bool:
        kept = self.kept.get(key)
        return kept is not None and (now < kept.ends or any(key in r.wants for r in self.waiting))

    def use(self, key: Key, now: float, ttl_s: float, by: Request | None) -> None:
        """What is over stays so: its use is none."""
        if self.is_alive(key, now):
            kept = self.kept[key]
            kept.renew(now, ttl_s)
            if by is None or kept.by is None or by.since >= kept.by.since:
                kept.by = by

    def compute(self, key: Key, now: float, ttl_s: float, by: Request, end: float) -> None:
        """Args: end: up to when what it is a part of is kept."""
        if self.is_alive(key, now):
            self.use(key, now, ttl_s, by)
        else:
            self.kept[key] = Kept(max(end, now + ttl_s), ttl_s, by)

    def activity(self, request: Request, now: float) -> None:
        """The request lives: all that it has found and computed is in use by it all the time,
        unless another request has taken it over."""
        for key, ttl_s in request.used.items():
            kept = self.kept[key]
            if kept.by is request or not self._moves:
                kept.renew(now, ttl_s)

    def look(
        self,
        request: Request,
        pieces: Sequence[Piece],
        tails: Iterable[Key],
        now: float,
        begun: Container[Piece],
    ) -> None:
        """It found these. Who used what stands behind a chunk has used that chunk, too.

        Args:
            begun: those of them of whose chunks it has a part alone, which is no use.
        """
        longest, end, found = request.ttl_s, 0.0, dict[Key, float]()
        longest_here = request.ttl_s
        spine = [piece for piece in pieces if not piece.group and piece.first is None]
        for piece in reversed(spine):
            if piece in begun or piece.chunk.name.num_tokens % GRAIN:
                continue  # of what has an end the tails say who uses it
            kept = self.kept[piece.chunk.name.key]
            longest, end = max(longest, kept.ttl_s), max(end, kept.ends)
            found[piece.chunk.name.key] = longest
            kept.ends = max(kept.ends, end)
            if piece is spine[-1] and piece.stop % CHUNK_TOKENS:
                longest_here = longest
            request.shares[piece.start // CHUNK_TOKENS] = longest, end
        for piece in pieces[len(spine) :]:
            is_moved = piece.first is not None  # so it is of no chunk of the request
            if piece in begun:
                continue
            ttl_s, end = (
                (request.ttl_s, 0.0) if is_moved else request.shared(piece.start // CHUNK_TOKENS)
            )
            kept = self.kept[piece.chunk.name.key]
            kept.ends, found[piece.chunk.name.key] = max(kept.ends, end), max(kept.ttl_s, ttl_s)
        for key in tails:  # one that is used with others' beginning is kept as long as that
            if self.is_alive(key, now):
                found.setdefault(key, longest_here)
        for key, ttl_s in found.items():
            self.kept[key].renew(now, ttl_s)
            self.kept[key].by = request
        self.activity(request, now)  # what it found before, too: accepted in docs/faults.md
        request.used |= found
        request.wants = {piece.chunk.name.key for piece in pieces}


class History:
    """One store, and what happens to it. Each step is a method `do_...`."""

    weights: Mapping[str, float] = WEIGHTS
    """By step, how often it is taken."""
    num_texts = 5
    """Texts that a new one leaves."""

    def __init__(self, seed: int, eviction: str, clock: Clock | None = None) -> None:
        self.rng = rng = Random(seed)
        self.clock = clock or Clock()
        self.eviction = eviction
        self.server_ttl_s = self.server_ttl()
        self.ttls_s = rng.choice(TTLS_S)
        self.dram_slots = rng.choice([4, 6, 12])
        self.oracle = Oracle(moves=eviction != "fifo")
        self.log: list[str] = []
        self.names: dict[Key, list[int]] = {}
        """All tokens up to the end of each chunk that was saved."""
        self.sections: dict[Key, list[int]] = {}
        """The same of other groups than the spine."""
        self.left = {name: list[int]() for name in SESSIONS}
        """Numbers of the runs that requests of each session have left."""
        self.num_requests = self.num_tokens = 0
        self.texts = [self.more(48)]
        self.running: list[Request] = []
        self.rests: list[Request] = []
        self.saving: list[Chunk] = []
        num_records = rng.choice([6, 12, 24])
        self.device = MemoryDevice(slab_bytes(num_records))
        slab = new_slab(num_records)
        format_device(self.device, slab)
        self.rig = self.open_rig(slab)

    def server_ttl(self) -> float | None:
        return self.rng.choice([None, 60.0, 60.0, 100.0])

    def open_rig(self, slab: Slab) -> Rig:
        return Rig(self.device, slab, self.dram_slots, options=self.options())

    def close_rig(self) -> None:
        self.rig.pool.close()

    def lookup_of(self, tokens: Sequence[int]) -> Lookup:
        return Lookup(sequence_of(tokens))

    def options(self) -> dict[str, object]:
        return {
            "clock": self.clock,
            "wall": self.clock,
            "ttl_s": self.server_ttl_s,
            "eviction": self.eviction,
            "threaded": False,
        }

    def play(self, num_steps: int = STEPS) -> None:
        try:
            for _ in range(num_steps):
                self.step()
                self.check()
        except AssertionError as error:
            raise AssertionError("\n".join([*self.log[-60:], str(error)])) from error
        finally:
            self.close()

    def step(self) -> None:
        step = self.rng.choices([*self.weights], [*self.weights.values()])[0]
        getattr(self, f"do_{step}")()

    def say(self, what: str) -> None:
        self.log.append(f"{self.clock.now - 1000.0:7.1f} {what}")

    def more(self, count: int) -> list[int]:
        first = self.num_tokens + 1
        self.num_tokens += count
        return list(range(first, first + count))

    # ---- requests ----------------------------------------------------------------------

    def do_arrive(self) -> None:
        """A prompt that begins as an earlier one, and goes on as that or otherwise."""
        rng, text = self.rng, self.rng.choice(self.texts)
        ends = [len(text), len(text) // CHUNK_TOKENS * CHUNK_TOKENS, rng.randint(1, len(text))]
        cut = max(1, rng.choice(ends))
        if rng.random() < 0.5 and cut < TOKENS_MAX:
            text = text[:cut] + self.more(rng.randint(1, min(40, TOKENS_MAX - cut)))
            self.texts[:] = [*self.texts[-self.num_texts :], text]
            cut = rng.randint(cut, len(text))
        own = rng.choice(self.ttls_s)
        ttls = [ttl for ttl in (own, self.server_ttl_s) if ttl is not None]
        self.num_requests += 1
        lookup = self.lookup_of(text[:cut])
        request = Request(
            self.num_requests, text, cut, min(ttls, default=math.inf), lookup, self.clock.now
        )
        request.terms = self.terms(own, ttls)
        waits = rng.random() < 0.4
        if waits:
            with self.rig.store.queue() as queue:
                queue.append(request.id)
        tails = [*self.tails(text[:cut], cut - 1)]
        pieces, request.visit = self.rig.store.arrive(request.id, lookup, cut, 1, request.terms)
        self.say(
            f"{request.id} arrives: {text[0]}..{text[cut - 1]} ({cut} of {len(text)}), ttl "
            f"{own}, pin {request.terms.pin_s}, waits {waits}, finds {self.ends_of(pieces)}"
        )
        self.check_found(pieces)
        begun = self.begun([*request.lookup.keys.token_ids], pieces)
        self.oracle.look(request, pieces, tails, self.clock.now, begun)
        spine = [piece for piece in pieces if not piece.group and piece.first is None]
        hit = spine[-1].stop // CHUNK_TOKENS if spine else 0
        request.next_save = rng.choice([0, hit])
        if waits:
            self.oracle.waiting.append(request)
        else:
            self.running.append(request)

    def terms(self, own: float | None, ttls: list[float]) -> Terms:
        """Of a request whose own ttl this is, and with the server's these. No priority and no name
        of a session makes KV last longer."""
        priority, name = self.rng.choice(PRIORITIES), self.rng.choice([None, *SESSIONS])
        session = None if name is None else frozenset(self.left[name][-RUNS_MAX:])
        return Terms(priority, own, session=session)

    def do_look_again(self) -> None:
        if not self.oracle.waiting:
            return
        request = self.rng.choice(self.oracle.waiting)
        stop = request.num_prompt - 1
        tails = [*self.tails(request.tokens, stop)]
        pieces = self.rig.store.find(
            request.lookup, 0, stop, request_id=request.id, visit=request.visit
        )
        self.say(f"{request.id} looks again: {self.ends_of(pieces)}")
        self.check_found(pieces)
        begun = self.begun([*request.lookup.keys.token_ids], pieces)
        self.oracle.look(request, pieces, tails, self.clock.now, begun)

    def do_begin(self) -> None:
        if not self.oracle.waiting:
            return
        request = self.rng.choice(self.oracle.waiting)
        self.rig.store.leave_queue([request.id])
        self.oracle.waiting.remove(request)
        if self.rng.random() < 0.8:
            self.running.append(request)
        self.say(f"{request.id} begins")

    def do_prefetch(self) -> None:
        text = self.rng.choice(self.texts)
        stop = self.rng.randint(1, len(text))
        tails = [*self.tails(text, stop)]
        pieces = self.rig.store.find(self.lookup_of(text[:stop]), 0, stop)
        self.say(f"prefetch {text[0]}..{text[stop - 1]} ({stop}): {self.ends_of(pieces)}")
        self.check_found(pieces)
        begun = self.begun(text[:stop], pieces)
        used = {piece.chunk.name.key for piece in pieces if piece not in begun}
        for key in {*tails, *used}:
            self.oracle.use(key, self.clock.now, 0.0, None)

    def begun(self, tokens: list[int], pieces: Iterable[Piece]) -> set[Piece]:
        """Those of these of whose chunks a request of these tokens has a part alone: it goes on
        otherwise, or moves no more. Of tokens that end within a chunk the whole blocks count."""
        found = set()
        for piece in pieces:
            name = piece.chunk.name
            whole = name.end if name.end <= len(tokens) else (len(tokens) - 1) // GRAIN * GRAIN
            stored = (self.names | self.sections)[name.key][:whole]
            if piece.first is not None:
                has_part = piece.stop - piece.start < name.num_tokens
            else:
                has_part = name.num_tokens % GRAIN == 0 and tokens[:whole] != stored
            if has_part:
                found.add(piece)
        return found

    def tails(self, tokens: Sequence[int], stop: int) -> Iterator[Key]:
        """Stored tails with an end whose whole blocks stand in these tokens: they are used by who
        has those (index/prefix.py, 4)."""
        for chunk in list(self.rig.store.residency.index):
            name = chunk.name
            count = name.num_tokens % CHUNK_TOKENS
            blocks = count // GRAIN * GRAIN
            if count % GRAIN and name.key in self.names and name.position + blocks <= stop:
                if (
                    self.names[name.key][: name.position + blocks]
                    == tokens[: name.position + blocks]
                ):
                    yield name.key

    # ---- saving ------------------------------------------------------------------------

    def do_save(self) -> None:
        if not self.running:
            return
        request = self.rng.choice(self.running)
        for _ in range(self.rng.randint(1, 4)):
            self.save(request, yields=False)

    def do_save_rest(self) -> None:
        rests = [r for r in self.rests if self.clock.now - r.ended_at <= REST_S]
        if rests:
            self.save(self.rng.choice(rests), yields=True)

    def save(self, request: Request, *, yields: bool) -> None:
        names, number = request.names(), request.next_save
        if number == len(names):
            return
        name, run = names[number], request.visit.run(number)
        chunk = self.save_chunk(request, name, run, yields=yields)
        request.next_save += chunk is not None or self.rng.random() < 0.8
        if self.rng.random() < 0.8:
            self.do_finish_saves()

    def save_chunk(
        self,
        request: Request,
        name: ChunkName,
        run: Run,
        *,
        group: int = 0,
        is_alone: bool = False,
        yields: bool,
    ) -> Chunk | None:
        store, now, number = self.rig.store, self.clock.now, name.position // CHUNK_TOKENS
        before = store.residency.index.get(name.key)
        was_known = before is not None
        was_alive = was_known and self.oracle.is_alive(name.key, now)
        again, low_value = self.rng.random() < 0.4, self.rng.random() < 0.1
        may_pin = name.position < request.num_prompt and not low_value
        pin_s = request.terms.pin_s if may_pin else None
        num_expired = store.residency.num_expired
        chunk = store.begin_save(
            name,
            run,
            pin_s,
            again=again,
            low_value=low_value,
            is_alone=is_alone,
            yields=yields,
        )
        self.say(
            f"{request.id} saves {number} of group {group}, again {again}, low {low_value}, "
            f"yields {yields}: "
            f"{'a copy' if chunk else 'none'}, known {was_known}"
        )
        # It may have ended earlier than the oracle says: then it is computed anew.
        was_alive &= store.residency.num_expired == num_expired
        ttl_s, end = request.kept_by(name, group)
        if chunk is not None:
            of_group = self.names if group == 0 else self.sections
            of_group[name.key] = request.tokens[: name.position + name.num_tokens]
            self.saving.append(chunk)
        if not yields:
            self.oracle.activity(request, now)
        if chunk is not None:
            at = request.ended_at if yields else now
            if not (yields and was_alive):
                self.oracle.compute(name.key, at, ttl_s, request, end)
                request.used[name.key] = ttl_s
                if chunk is not before:  # nothing is left there that a later request has used
                    self.oracle.kept[name.key].by = request
        elif was_known and not (yields or low_value):
            self.oracle.use(name.key, now, ttl_s, request)
            request.used[name.key] = ttl_s
        return chunk

    def do_finish_saves(self) -> None:
        self.rig.store.finish_saves(self.saving)
        self.saving = []

    def do_end(self) -> None:
        """The request ends, and what it leaves may be worth less from now on."""
        if not self.running:
            return
        request = self.running.pop(self.rng.randrange(len(self.running)))
        request.ended_at = self.clock.now
        self.oracle.activity(request, self.clock.now)
        self.rig.store.answered(request.visit.own, len(request.tokens) - request.num_prompt)
        self.left[self.rng.choice(SESSIONS)].append(request.visit.own.number)
        index = self.rig.store.residency.index
        chunks = [chunk for key in request.used if (chunk := index.get(key)) is not None]
        chunks = self.rng.sample(chunks, self.rng.randint(0, min(2, len(chunks))))
        if chunks and self.rng.random() < 0.5:
            self.rig.store.make_low_priority(chunks)
        else:
            chunks = []
        self.say(f"{request.id} ends, less worth: {[chunk.name.position for chunk in chunks]}")
        self.rests = [*self.rests[-3:], request]

    # ---- the rest ----------------------------------------------------------------------

    def do_wait(self) -> None:
        self.clock.now += self.rng.choice([1.0, 5.0, 10.0, 19.0, 21.0, 40.0, 59.5, 61.0])

    def do_tick(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.rig.store.tick()

    def do_restart(self) -> None:
        """A clean end. The next start finds what was written."""
        self.do_finish_saves()
        for _ in range(self.rng.choice([0, 8])):
            self.rig.store.tick()
        self.close_rig()
        self.say("restart")
        image, self.device = self.device.image, MemoryDevice(len(self.device.image))
        self.device.image[:] = image
        self.running, self.rests, self.oracle.waiting = [], [], []
        self.rig = self.open_rig(found_slab(image))
        for _ in range(self.rng.choice([1, 8])):
            self.rig.store.tick()

    def close(self) -> None:
        self.do_finish_saves()
        for _ in range(4):
            self.rig.store.tick()
        self.rig.store.check_integrity()
        self.close_rig()

    # ---- what must hold ----------------------------------------------------------------

    def ends_of(self, pieces: Sequence[Piece]) -> list[int]:
        return [piece.stop for piece in pieces]

    def check_found(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            key = piece.chunk.name.key
            assert self.oracle.is_alive(key, self.clock.now), (
                f"found, and not used for its ttl: {piece.start}..{piece.stop}, "
                f"{self.oracle.kept.get(key)}"
            )

    def check(self) -> None:
        residency = self.rig.store.residency
        for chunk in list(residency.index):
            lease, name = residency.run_of(chunk).lease, chunk.name
            ends = math.inf if lease is None else lease.expires
            if (pin := residency.pinning.of(chunk, self.clock.now)) is not None:
                ends = max(ends, pin.until)
            tokens = (self.names | self.sections)[name.key]
            kept = self.oracle.kept.get(name.key)
            assert kept is not None
            assert ends <= kept.ends + 1e-6, (
                f"tokens {name.position} to {name.position + name.num_tokens} of "
                f"{tokens[0]}..{tokens[-1]} may be found for "
                f"{ends - kept.ends} s too long ({ends - 1000} for {kept.ends - 1000})"
            )


SEEDS = [range(80), pytest.param(range(80, 2000), marks=pytest.mark.long)]


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_nothing_renews_a_lease_but_a_use(eviction: str, seeds: range) -> None:
    for seed in seeds:
        try:
            History(seed, eviction).play()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {eviction}\n{error}") from error
