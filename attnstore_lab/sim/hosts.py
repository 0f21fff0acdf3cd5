# SPDX-License-Identifier: Apache-2.0
"""Many servers in one virtual time: a router before them, a tier that they may share.

    arrivals -> router -> one of N servers (server.py) <-> shared tier (shared_tier.py)

Whichever server's next event is nearest goes on, so all see the shared tier, and the router sees
them, as they are at that moment. An answer ends at the same time wherever its session goes on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.shared_tier import MakeHostTier, Network, SharedStore
from attnstore_lab.sim.simulated_store import NAMESPACE
from attnstore_lab.sim.trace import Trace, TraceRequest
from attnstore_lab.sim.trace_tokens import TraceTokens
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.io.device import Op
from attnstore_vllm.types import Key

ROUTERS = ("round-robin", "conversation", "events", "events-half")
"""conversation: each stays at its host. events: the host that holds most of the prompt, of equal
ones the least loaded. events-half: the same, but less than half of the prompt counts as nothing."""
GENERATING_S = 0.25
"""A server that only generates looks so often whether a request has come from elsewhere."""


@dataclass(frozen=True, slots=True)
class HostsOutcome:
    """Figures of a run over so many hosts; the network's are of the whole run."""

    num_hosts: int
    router: str
    network: Network
    total: Outcome
    """Sums over all hosts."""
    requests: Sequence[int]
    """Numbers of counted requests, by host."""
    network_read: int
    network_written: int


class Host(Server):
    """One of the servers. `arrivals` and `later` are those of all of them."""

    def __init__(self, hosts: Hosts, trace: Trace, machine: Machine, warmup: int) -> None:
        make = MakeHostTier(hosts.shared, machine.io_depth) if hosts.shared is not None else None
        super().__init__(
            replace(trace, requests=[]),
            machine,
            hosts.policy,
            warmup=warmup,
            patience_s=hosts.patience_s,
            step=hosts.step,
            more_tiers=[make] if make is not None else [],
        )
        self._hosts = hosts
        self._link = None
        if make is not None and self.store is not None:
            self._link = make.made
            self.store.before_arrival = self._link.look_up
        self._arrivals = hosts.arrivals
        self._later = hosts.later
        self._until = 0.0
        self._has_nothing_to_do = False

    @property
    def gave_up(self) -> bool:
        """Whether a request waits here for longer than clients do."""
        return not self._out.is_served

    @property
    def num_requests(self) -> int:
        """Requests that are here now: its load."""
        return len(self._waiting) + len(self._running)

    @property
    def next_at(self) -> float:
        """When it goes on. An arrival may change it."""
        return min(self._until, self._next_end)

    def held_tokens(self, request: TraceRequest, keys: Sequence[Key]) -> int:
        """Leading tokens of whole chunks that its own tiers hold, as KV events would tell."""
        chunks = self._hbm.block_pool.cached_block_hash_to_block
        in_hbm = sum(1 for _ in takewhile(chunks.__contains__, request.chunks.tolist()))
        own = 0
        if self.store is not None:
            index = self.store.residency.index
            nvme = self.store.residency.nvme.name
            for entry in index.entries.find_run(list(keys)):
                chunk = index.live(entry)  # None: at rest on NVMe
                if chunk is not None and State.READY not in (
                    chunk.dram.state,
                    chunk.at(nvme).state,
                ):
                    break
                own += 1
        return max(own, in_hbm) * self._trace_chunk_tokens

    def come(self, at: float, number: int, request: TraceRequest, history: int) -> None:
        """The router has sent a request here."""
        self.now = max(self.now, at)
        self._arrive(at, number, request, history)

    def have_come(self) -> None:
        """All that come at this time have."""
        self._tick()
        if self._has_nothing_to_do:
            self._until = self.now

    # ---- in place of the server's own ------------------------------------------------------

    @property
    def _is_live(self) -> bool:
        return not self._hosts.is_over

    @property
    def _next_arrival(self) -> float:
        return self._hosts.next_arrival(self.now)

    @property
    def _next_end(self) -> float:
        ends = self._disk.next_end
        return ends if self._link is None else min(ends, self._link.next_end)

    def _tick(self) -> None:
        super()._tick()
        while self._link is not None and self._link.take_ended():
            super()._tick()

    def _wait_until(self, tick: float) -> Iterator[None]:
        self._has_nothing_to_do = True
        yield from self._pass_until(min(self._next_end, tick))
        self._has_nothing_to_do = False

    def _pass_until(self, end: float) -> Iterator[None]:
        self._until = end
        while True:
            yield
            if self._next_end > self._until:
                break
            self.now = max(self.now, self._next_end)
            self._tick()
        self.now = max(self.now, self._until)
        self._tick()


class Hosts:
    """One run.

    Args:
        machine: each host's.
        warmup: so many requests come before anything is counted.
        patience_s: the run ends when a request has waited for so long at any host.
        step: called after each request, for a progress bar.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        num_hosts: int,
        router: str,
        network: Network,
        *,
        policy: str = "attnstore",
        warmup: int = 0,
        patience_s: float = float("inf"),
        step: Callable[[], object] = lambda: None,
    ) -> None:
        assert router in ROUTERS
        assert machine.shape is None, "the shared tier knows one KV cache group"
        self.policy, self.patience_s, self.step = policy, patience_s, step
        self.shared = None
        if network.is_there:
            self.shared = SharedStore(network, machine.chunk_bytes, machine.chunk_tokens)
        everything = Server(trace, machine, "recompute")  # its queues of arrivals alone are used
        self.arrivals, self.later = everything.queues
        self._trace = trace
        self._router = router
        self._network = network
        self._conversations = conversations(trace)
        self._num_sent = 0
        self._sent = [0] * num_hosts
        thinks = [request.think_s for waiting in self.later.values() for _, request in waiting]
        self._sooner_s = max(GENERATING_S, min(thinks)) if thinks else float("inf")
        self.hosts = [Host(self, trace, machine, warmup) for _ in range(num_hosts)]

    @property
    def is_over(self) -> bool:
        return not self.arrivals and not any(host.is_busy for host in self.hosts)

    def next_arrival(self, now: float) -> float:
        """A time before which none comes from elsewhere, or so near that it does not matter."""
        known = self.arrivals[0][0] if self.arrivals else float("inf")
        return known if len(self.hosts) == 1 else min(known, now + self._sooner_s)

    def run(self) -> HostsOutcome:
        lives = [host.live() for host in self.hosts]
        for live in lives:  # up to where each waits for its first request
            next(live)
        events = [(host.next_at, number) for number, host in enumerate(self.hosts)]
        heapq.heapify(events)
        while not self.is_over:
            at, number = heapq.heappop(events)
            host = self.hosts[number]
            if self.arrivals and self.arrivals[0][0] <= at:
                heapq.heappush(events, (at, number))
                for sent in self._send():
                    heapq.heappush(events, (self.hosts[sent].next_at, sent))
                continue
            if at != host.next_at:
                continue  # an arrival has changed it: it stands at its new time too
            next(lives[number], None)
            if host.gave_up:
                break
            heapq.heappush(events, (host.next_at, number))
        outcomes = [host.end() for host in self.hosts]
        moved = self.shared.num_moved if self.shared is not None else {Op.READ: 0, Op.WRITE: 0}
        size = self.shared.record_bytes if self.shared is not None else 0
        return HostsOutcome(
            len(self.hosts),
            self._router,
            self._network,
            together(outcomes),
            [out.num_requests for out in outcomes],
            moved[Op.READ] * size,
            moved[Op.WRITE] * size,
        )

    def _send(self) -> set[int]:
        """Send all requests that come at the next time. Returns to whom."""
        now, touched = self.arrivals[0][0], set()
        while self.arrivals and self.arrivals[0][0] <= now:
            at, number, request, history = heapq.heappop(self.arrivals)
            chosen = self._choose(number, request)
            self._num_sent += 1
            self._sent[chosen] += 1
            touched.add(chosen)
            self.hosts[chosen].come(at, number, request, history)
        for chosen in touched:
            self.hosts[chosen].have_come()
        return touched

    def _choose(self, number: int, request: TraceRequest) -> int:
        if self._router == "round-robin":
            return self._num_sent % len(self.hosts)
        if self._router == "conversation":
            return self._conversations[number] % len(self.hosts)
        size = self._trace.chunk_tokens
        tokens = TraceTokens(request.chunks, request.known_tokens, size, -1)
        keys = SequenceKeys(root_key(NAMESPACE, None, b""), tokens, size)
        names = keys.keys(0, request.num_tokens // size)
        held = [host.held_tokens(request, names) for host in self.hosts]
        if self._router == "events-half":
            held = [tokens if 2 * tokens >= request.num_tokens else 0 for tokens in held]
        loads = [(-h, host.num_requests) for h, host in zip(held, self.hosts, strict=True)]
        return min(range(len(loads)), key=lambda i: (*loads[i], self._sent[i], i))


def conversations(trace: Trace) -> list[int]:
    """The number of each request's conversation, in the order in which they begin.

    Where a trace has none it is that of the request whose last whole chunk it repeats. The first
    chunk does not count: many have the same system prompt there.
    """
    numbers: list[int] = []
    known: dict[object, int] = {}
    num_begun = 0
    for request in trace.requests:
        chunks = request.chunks[: request.known_tokens // trace.chunk_tokens].tolist()
        names = [("session", request.session)] if request.session >= 0 else chunks[:0:-1]
        number = next((known[name] for name in names if name in known), None)
        if number is None:
            number, num_begun = num_begun, num_begun + 1
        for name in names[:1]:
            known[name] = number
        numbers.append(number)
    return numbers


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Sums over hosts; the run lasts as long as the longest."""
    total = Outcome(outcomes[0].policy)
    for field in fields(Outcome):
        values = [getattr(out, field.name) for out in outcomes]
        if field.name == "duration_s":
            total.duration_s = max(values)
        elif field.name == "gave_up_at_s":
            total.gave_up_at_s = min((v for v in values if v is not None), default=None)
        elif field.name == "sessions":  # one may have gone from host to host
            for session, (begin, end) in (item for value in values for item in value.items()):
                known = total.sessions.get(session, (begin, end))
                total.sessions[session] = min(known[0], begin), max(known[1], end)
        elif isinstance(values[0], list | Counter):
            merged = type(values[0])()
            for value in values:
                merged += value
            setattr(total, field.name, merged)
        elif field.name != "policy":
            setattr(total, field.name, sum(values))
    return total


def one_large(machine: Machine, num_hosts: int) -> Machine:
    """One server with all that so many have; only a step of its answers takes as long as theirs."""
    return replace(
        machine,
        **{
            name: getattr(machine, name) * num_hosts
            for name in (
                "hbm", "dram", "nvme", "prefill_tokens_per_s", "max_num_seqs",
                "max_num_batched_tokens", "hbm_bandwidth", "nvme_read", "nvme_write", "io_depth",
            )
        },
    )  # fmt: skip
