# SPDX-License-Identifier: Apache-2.0
"""Evictions of what comes back, of recorded agents, with hints and without, and over plain LRU.

    python -m benchmarks.agent_evictions --trace claude_code_weka_sessions.jsonl.gz [--requests N]

Sessions come at their recorded times to a simulated server whose steps take next to no time: what
is looked up, saved and evicted is decided by the server's own code. What counts is a chunk that an
earlier request has computed, and that is in no tier when it is asked for again: it was evicted, or
there was no room to save it. Those that were evicted are counted apart, too.

    lru              plain LRU, without looking ahead: what CacheWise compares with
    none             the store, and no hint
    session, tool    `session`, `parent` of agents that others have begun, `agent` and `tool`
    ended            `session`, and `ended: true` with the last request of each session
    all              all of these
    oracle           Belady: the future is known. No policy evicts less of what comes back

The recorded sessions name no tools: `tool` says whether one has answered. Their words are not
recorded, so how an answer ends cannot be read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final

from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.summary import table
from attnstore_lab.progress import progress
from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.one_pool import AT_ONCE
from attnstore_lab.sim.pools import Belady
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.tiers.announced import Announced
from benchmarks.quick import RESULTS, destination

CAPACITIES: Final = (0.02, 0.05, 0.1, 0.2)
"""DRAM, as shares of the distinct chunks. One hundredth is less than a prompt."""
REQUESTS: Final = 2000
SESSIONS_S: Final = 0.02
CHUNK_TOKENS: Final = 1024
GOAL: Final = 0.5
ORACLE: Final = "oracle"
ARMS: Final[dict[str, tuple[str, ...]]] = {
    "lru": (),
    "none": (),
    "session, tool": ("session", "parent", "tool", "agent"),
    "ended": ("session", "parent", "ended"),
    "all": ("session", "parent", "tool", "agent", "ended"),
    ORACLE: (),
}
"""Which hints are told in each."""


class Evictions(Announced):
    """Counts in the place of the store's books of KV events, which hear of each chunk that leaves
    its last tier."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__()
        self.evicted = self.evicted_back = self.came_back = 0
        self._index = index
        self._gone, self._asked = set[bytes](), set[bytes]()

    def at(self, chunk: Chunk) -> None:
        """It is still in a tier."""

    def gone(self, key: bytes) -> None:
        self.evicted += 1
        self._gone.add(key)

    def asked(self, keys: Sequence[bytes]) -> None:
        """A request's prompt has these whole chunks. Once it is served, all are computed."""
        find = self._index.entries.find
        missing = [key for key in keys if find(key) < 0]  # what was evicted may be saved again
        self.came_back += sum(key in self._asked for key in missing)
        self.evicted_back += sum(key in self._gone for key in missing)
        self._gone.difference_update(keys)
        self._asked.update(keys)


@dataclass(frozen=True, slots=True)
class Counted:
    """Chunks, and the part of all prompt tokens that was found."""

    evicted: int
    evicted_back: int
    """Of `evicted`, those that were asked for again: once for each time."""
    came_back: int
    """Those that were not saved before they were asked for again, too."""
    found: float


def with_hints(trace: Trace, keys: Sequence[str]) -> Trace:
    """The same requests, each of which tells these hints."""

    def of(request: TraceRequest) -> TraceRequest:
        said = {key: request.told[key] for key in keys if request.told.get(key)}
        return replace(request, hints={"attnstore": said}) if said else request

    return replace(trace, requests=[of(request) for request in trace.requests])


def counted(
    trace: Trace, policy: str, dram: int, nvme: int = 0, step: Callable[[], object] = lambda: None
) -> Counted:
    """Serve the trace with so many slots in each tier.

    Args:
        policy: lru or attnstore.
    """
    size = trace.chunk_tokens
    hardware = replace(
        AT_ONCE, chunk_tokens=size, dram=dram * size, nvme=max(1, nvme) * size,
        max_num_batched_tokens=1 << 20,
    )  # fmt: skip
    server = Server(trace, hardware, policy, step=step)
    assert server.store is not None
    if not nvme:
        server.store.residency.lose(server.store.residency.nvme)
    told = server.store.residency.watch = Evictions(server.store.residency.index)

    def asks(keys: SequenceKeys, stop: int) -> None:
        told.asked(keys.keys(0, (stop + 1) // size))

    server.store.before_arrival = asks
    found = server.run().hit_tokens_share
    return Counted(told.evicted, told.evicted_back, told.came_back, found)


def oracle(trace: Trace, slots: int, step: Callable[[], object] = lambda: None) -> Counted:
    """The same of one pool whose policy knows the future. What it does not take, it evicts."""
    pool, seen = Belady(slots, trace), set[int]()
    stored = came_back = found = 0
    for request in trace.requests:
        chunks = request.chunks.tolist()
        missing = [chunk for chunk in chunks if chunk not in pool]
        came_back += sum(chunk in seen for chunk in missing)
        stored += len(missing)
        seen.update(missing)
        leading = chunks.index(missing[0]) if missing else len(chunks)
        found += leading * trace.chunk_tokens
        pool.store(request, chunks, leading)
        step()
    left = sum(chunk in pool for chunk in seen)
    return Counted(stored - left, came_back, came_back, found / trace.num_tokens)


def every_so_many(trace: Trace, number: int) -> Trace:
    """Every so many-th session, for about so many requests. They begin when they did among all, so
    that as large a part of them is over when others come."""
    every = max(1, round(len(trace.requests) / number))
    kept = [r for r in trace.requests if int(r.told["session"].split("/")[0]) % every == 0]
    return make_trace(trace.name, trace.chunk_tokens, kept)


def measure(
    trace: Trace, nvme: float = 0.0, step: Callable[[str], object] = lambda _: None
) -> list[dict[str, Any]]:
    """A row for each capacity and arm.

    Args:
        nvme: its share of the distinct chunks.
    """
    behind = int(nvme * trace.num_chunks)
    return [
        {
            "dram": dram, "nvme": nvme, "hints": arm, "evicted": one.evicted,
            "evicted_back": one.evicted_back, "came_back": one.came_back,
            "tokens": one.came_back * trace.chunk_tokens,
            "over_none": over(one, found["none"]), "over_lru": over(one, found["lru"]),
            "found": round(one.found, 4),
        }
        for dram in CAPACITIES
        for found in [by_arm(trace, max(1, int(dram * trace.num_chunks)), behind, step)]
        for arm, one in found.items()
    ]  # fmt: skip


def by_arm(
    trace: Trace, slots: int, behind: int, step: Callable[[str], object]
) -> dict[str, Counted]:
    found: dict[str, Counted] = {}
    for arm, keys in ARMS.items():
        tell = partial(step, f"{slots} chunks, {arm}")
        if arm == ORACLE:
            found[arm] = oracle(trace, slots + behind, tell)
            continue
        policy = "lru" if arm == "lru" else "attnstore"
        found[arm] = counted(with_hints(trace, keys), policy, slots, behind, tell)
    return found


def over(one: Counted, other: Counted) -> float | None:
    return round(one.came_back / other.came_back, 3) if other.came_back else None


def verdict(rows: Sequence[dict[str, Any]], base: str) -> str:
    """Of which capacities the goal is reached with the hints, and of which by the oracle.

    Args:
        base: over_none or over_lru.
    """

    def where(*arms: str) -> str:
        shares = {
            f"{row['dram']:.0%}": None
            for row in rows
            if row["hints"] in arms and row[base] is not None and row[base] <= GOAL
        }
        return ", ".join(shares) or "no capacity"

    hints = where(*(arm for arm, keys in ARMS.items() if keys))
    what = base.replace("_", " ")
    return f"{GOAL} {what}: hints reach it at {hints}, the oracle at {where(ORACLE)}"


def lines(rows: Sequence[dict[str, Any]]) -> str:
    heads = "evicted", "of it came back", "came back in all", "over none", "over lru", "found"
    cells: list[Sequence[str]] = [("DRAM, hints", *heads)]
    for row in rows:
        counts = (f"{row[key]:,}" for key in ("evicted", "evicted_back", "came_back"))
        ratios = (row[base] for base in ("over_none", "over_lru"))
        shown = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        cells.append((f"{row['dram']:.0%}, {row['hints']}", *counts, *shown, f"{row['found']:.1%}"))
    return table(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument(
        "--requests", type=int, help=f"about so many, of whole sessions; published: {REQUESTS}"
    )
    parser.add_argument("--nvme", type=float, default=0.0, help="share of the chunks; hours")
    parser.add_argument("--json", action="store_true", help="write agent_evictions.json, too")
    parser.add_argument("--out", type=Path, help="of --json")
    args = parser.parse_args()
    is_quick = args.requests is not None or args.nvme > 0
    out = destination(RESULTS / "agent_evictions.json", args.out, is_quick=is_quick)
    where, today = machine(), date.today().isoformat()
    trace = read_trace(args.trace, Arrivals(sessions_s=SESSIONS_S), chunk_tokens=CHUNK_TOKENS)
    trace = every_so_many(trace, args.requests or REQUESTS)
    total = len(CAPACITIES) * len(ARMS) * len(trace.requests)
    with progress("requests served", total) as bar:

        def step(what: str) -> None:
            bar.what = what
            bar.step()

        rows = measure(trace, args.nvme, step)
    verdicts = [verdict(rows, base) for base in ("over_none", "over_lru")]
    seconds = round(time.process_time())
    print(lines(rows), *verdicts, f"{seconds} s of a processor", sep="\n")
    if args.json:
        report = {
            "machine": where, "date": today, "trace": trace.name, "goal": GOAL,
            "requests": len(trace.requests), "chunks": trace.num_chunks,
            "chunk_tokens": CHUNK_TOKENS, "sessions_per_s": SESSIONS_S, "processor_s": seconds,
            "verdicts": verdicts, "results": rows,
        }  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
