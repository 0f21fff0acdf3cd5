# SPDX-License-Identifier: Apache-2.0
"""The quick form of gpu-e2e: one run within a budget of seconds, for a GPU that is lent.

Servers start side by side where memory allows: small ones whose answers are compared, and, of the
timed model, one with the store, one with vLLM's own OffloadingConnector and one with neither.
Then come answers, hits, throughput, and the small servers again, after a restart.

Each step is a row from the first moment on: "not run" until it was, with why. The rows are handed
over after each step, so that a run that is interrupted leaves what it has measured.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from attnstore_lab.testing.tiny_model import ModelShape, make_model
from attnstore_vllm.config.values import parse_size
from benchmarks.e2e.answers import (
    FOUND,
    NOISE,
    PREEMPTED,
    NotHere,
    Prompted,
    Reference,
    Tried,
    Wrong,
    ask_crowd,
    wait_until_written,
)
from benchmarks.e2e.cases import CASES, EAGER
from benchmarks.e2e.figures import Figure, Row
from benchmarks.e2e.hits import Room, tiers, time_hits
from benchmarks.e2e.serving import Deadline, Served, Setup, why_it_ended
from benchmarks.e2e.sides import Need, Planned, Side, stop, waves
from benchmarks.e2e.speeds import DUMMIES
from benchmarks.rounding import drift
from benchmarks.server import ServerError

BUDGET_S: Final = 480.0
LEAST_S: Final = 20.0
"""With less time left, no step is begun."""
ANSWERED: Final = ("default", EAGER, "fp8-graphs", "runner-v1")
STORE, OFFLOADING, PLAIN = "attnstore", "offloading", "none"
TIMED: Final = (STORE, OFFLOADING, PLAIN)
OVER: Final = f"hits {STORE} over {OFFLOADING}"
OF_A_PROCESS: Final = 4 << 30
"""Bytes of HBM, or of memory on the CPU build, that a server takes beside weights and KV."""
ROUNDS: Final = 6
"""Of throughput; the first warms up."""


@dataclass(slots=True)
class Quick:
    """One run.

    Args:
        room: what is free of the machine.
        total_hbm: bytes, of which vLLM is told a share; 0 on the CPU build.
        wrote: gets all rows after each step.
    """

    setup: Setup
    budget_s: float
    room: Need
    total_hbm: int
    wrote: Callable[[list[Row]], None]
    rows: dict[str, Row] = field(init=False)
    _prompted: Prompted = field(init=False)
    _references: dict[str, Reference] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if not self.setup.is_cpu:
            crowd = (16, 1_800, 2_040)
            fewer = replace(
                self.setup.size, asked=(10, 500, 6_000), crowd=crowd, crowd_answer=160, decoders=4
            )
            self.setup = replace(self.setup, size=fewer)
        self._prompted = Prompted.of(self.setup.size)
        names = [
            "starts",
            *(f"answers {name}" for name in ANSWERED),
            *(f"hits {name}" for name in (STORE, OFFLOADING)),
            OVER,
            "throughput",
            *(f"nvme {name}" for name in ANSWERED),
        ]
        ended = "the run ended before it"
        self.rows = {name: Row(name, outcome="not run", why=ended) for name in names}

    def run(self) -> list[Row]:
        """Never raises for what a step does."""
        self._write()
        with Deadline(self.budget_s) as deadline:
            answered, timed = self._answering(), self._timing()
            found, too_large = waves([answered, timed], self.room)
            for one in too_large:
                self._skip(one.name, f"it takes {one.need}, and {self.room} are there")
            together = [{one.name for one in wave} for wave in found]
            is_open = self.rows["throughput"].outcome == "not run"
            if is_open and not any(names.issuperset(TIMED) for names in together):
                self._put("throughput", "not run", "its servers do not fit beside each other")
            for wave, names in zip(found, together, strict=True):
                if names != {PLAIN}:  # there is nothing to compare it with
                    self._run_wave(wave, deadline)
            kept = [one for one in answered if one.name in self._references]
            for wave in waves([kept], self.room)[0]:
                self._restart(wave, deadline)
        return list(self.rows.values())

    # ---- what is started -----------------------------------------------------------------

    def _answering(self) -> list[Planned]:
        size, found = self.setup.size, []
        need = self._need(size.shape, size.hbm, parse_size("dram", size.dram, 1))
        for name in ANSWERED:
            if self.setup.is_cpu and name != EAGER:
                self._skip(name, CASES[name].why_not_cpu or "the CPU build compiles for a minute")
                continue
            store = self.setup.work / f"{name}-store"
            found.append(
                Planned(name, CASES[name], need, {"store": store, "extra": self._share(need)})
            )
        return found

    def _timing(self) -> list[Planned]:
        size, room, found = self.setup.size, Room.of(self.setup.size), []
        try:
            settings, told = tiers(room.dram, self.setup.work)
        except NotHere as reason:
            for name in TIMED:
                self._skip(name, str(reason))
            return []
        self.rows[f"hits {STORE}"].tried.facts.append(told)
        model = make_model(self.setup.work / "timed", size.timed, weights=False)
        for name in TIMED:
            need = self._need(size.timed, room.hbm, 0 if name == PLAIN else room.dram)
            how: dict[str, Any] = {
                "hbm": room.hbm,
                "model": model,
                "model_len": room.model_len,
                "extra": [*DUMMIES, *self._share(need)],
            }
            if name == STORE:
                how["store"] = self.setup.work / "timed-store"
                how["settings"] = {**settings, "eviction": "lru"}
            elif name == OFFLOADING:
                how["extra"] += ["--kv-offloading-size", str(-(-room.dram >> 30))]
            case = CASES[EAGER if self.setup.is_cpu else "default"]
            found.append(Planned(name, case, need, how))
        return found

    @staticmethod
    def _need(shape: ModelShape, hbm: int, dram: int) -> Need:
        kv = int(1.1 * hbm * shape.kv_bytes_per_token)
        return Need(kv + shape.weight_bytes + OF_A_PROCESS, dram)

    def _share(self, need: Need) -> list[str]:
        """A start looks whether its share of HBM is free, and takes of it what it needs."""
        if not self.total_hbm:
            return []
        share = -(-1000 * need.hbm // self.total_hbm) / 1000
        return ["--gpu-memory-utilization", f"{share:.3f}", "--max-num-seqs", "32"]

    def _skip(self, name: str, why: str) -> None:
        """A server's steps."""
        for row in self.rows.values():
            is_timed = name in TIMED and row.name in (OVER, "throughput")
            if row.name in (f"answers {name}", f"nvme {name}", f"hits {name}") or is_timed:
                row.outcome, row.why = "skipped", f"{name}: {why}"
        self._write()

    # ---- steps ---------------------------------------------------------------------------

    def _run_wave(self, wave: Sequence[Planned], deadline: Deadline) -> None:
        sides = {one.name: Side(self.setup, one, deadline, one.name) for one in wave}
        try:
            threads = [
                self._begin(f"answers {name}", self._answers, name, sides[name])
                for name in ANSWERED
                if name in sides
            ]
            for name in TIMED:  # nothing is timed beside a start
                if name in sides:
                    with suppress(Exception):  # its steps say so
                        sides[name].get()
            for thread in threads:
                thread.join()
            self._starts(sides)
            for name in (STORE, OFFLOADING):
                if name in sides:
                    self._step(f"hits {name}", self._hits, name, sides[name])
            if STORE in sides or OFFLOADING in sides:
                self._step(OVER, self._over)
            if all(name in sides for name in TIMED):
                self._step("throughput", self._throughput, sides)
        finally:
            stop(sides)

    def _restart(self, wave: Sequence[Planned], deadline: Deadline) -> None:
        sides = {one.name: Side(self.setup, one, deadline, f"{one.name}-again") for one in wave}
        try:
            threads = [
                self._begin(f"nvme {name}", self._from_nvme, name, side)
                for name, side in sides.items()
            ]
            for thread in threads:
                thread.join()
        finally:
            stop(sides)

    def _begin(self, name: str, *step: Any) -> threading.Thread:
        thread = threading.Thread(target=self._step, args=(name, *step), daemon=True)
        thread.start()
        return thread

    def _left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self._began)

    def _step(self, name: str, work: Callable[..., str | None], *arguments: Any) -> None:
        """Do it, and write its row. `work` returns a remark, if there is one."""
        row, began = self.rows[name], time.monotonic()
        if (left := self._left_s()) < LEAST_S:
            self._put(name, "not run", f"{left:.0f} of {self.budget_s:.0f} s were left")
            return
        try:
            outcome, why = "ok", work(row, *arguments) or ""
        except NotHere as reason:
            outcome, why = "skipped", str(reason)
        except Exception as error:  # the next step may work
            kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
            if self._left_s() <= 0:  # its servers were ended
                kind = f"the {self.budget_s:.0f} s were over in it: {kind}"
            outcome, why = "failed", f"{kind}{error}"[-1500:]
        row.seconds = time.monotonic() - began
        self._put(name, outcome, why)

    def _put(self, name: str, outcome: str, why: str) -> None:
        self.rows[name].outcome, self.rows[name].why = outcome, why
        print(f"gpu-e2e: {name}: {outcome} {why}"[:400], file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> None:
        with self._lock:
            self.wrote(list(self.rows.values()))

    def _starts(self, sides: Mapping[str, Side]) -> None:
        """Seconds of each start, beside all others of its wave. vLLM's own offloading may not
        start here, which is its own row's to say."""
        row = self.rows["starts"]
        for name, side in sides.items():
            try:
                side.get()
                row.tried.note(name, seconds=round(side.seconds, 1))
            except Exception as error:  # of any kind: the row says which
                row.tried.note(name, error=f"{type(error).__name__}: {error}"[-1500:])
                if name != OFFLOADING:
                    row.tried.lacking.append(f"{name} did not start")
        outcome = "failed" if row.tried.lacking else "ok"
        self._put("starts", outcome, "; ".join(row.tried.lacking))

    def _answers(self, row: Row, name: str, side: Side) -> None:
        """Computed twice, the second time under a salt: what rounding does. Then from DRAM."""
        served, tried, size = side.get(), row.tried, self.setup.size
        asked, crowd = self._prompted.asked, self._prompted.crowd
        try:
            first = [served.ask(prompt, size.answer) for prompt in asked]
            again = [served.ask(prompt, size.answer, NOISE) for prompt in asked]
            tried.got.append(("computed again", "asked", again))
            served.empty_hbm()
            self._ask_all(served, tried, "dram")
            served.empty_hbm()
            before = served.counted(PREEMPTED)
            computed, salted = (ask_crowd(served, crowd, size.crowd_answer, s) for s in SALTS)
            tried.got.append(("crowd computed again", "crowd", salted))
            served.empty_hbm()
            loaded = sum(served.loaded().values())
            tried.got.append(("crowd", "crowd", ask_crowd(served, crowd, size.crowd_answer)))
            tried.wants("crowd", "loaded_tokens", sum(served.loaded().values()) - loaded, 1)
            tried.note("crowd", preempted=served.counted(PREEMPTED) - before)
            noise = [*map(drift, first, again), *map(drift, computed, salted)]
            self._references[name] = Reference(first, computed, noise)
            wait_until_written(served)
        finally:
            tried.facts, tried.complaints = served.facts(), served.complaints()
        self._judge(tried, name)

    def _from_nvme(self, row: Row, name: str, side: Side) -> None:
        served = side.get()
        self._ask_all(served, row.tried, "nvme")
        row.tried.complaints = served.complaints()
        self._judge(row.tried, name)

    def _ask_all(self, served: Served, tried: Tried, tier: str) -> None:
        """Of all that is stored, most has to come from there."""
        before = served.loaded()[tier]
        got = [served.ask(prompt, self.setup.size.answer) for prompt in self._prompted.asked]
        tried.got.append((tier, "asked", got))
        loaded = served.loaded()[tier] - before
        tried.wants(tier, "loaded_tokens", loaded, int(FOUND * self._prompted.num_tokens))

    def _judge(self, tried: Tried, name: str) -> None:
        if wrong := [*tried.judge(self._references[name]), *tried.lacking]:
            raise Wrong("; ".join(wrong))

    def _hits(self, row: Row, name: str, side: Side) -> None:
        """Alone; those of the store also beside others that generate."""
        served, size, tried = self._timed(name, side), self.setup.size, row.tried

        def got(figure: Figure) -> None:
            row.figures.append(figure)
            row.why = f"the run ended in it, after {len(row.figures)} figures"
            self._write()

        try:
            for decoders in (0, size.decoders) if name == STORE else (0,):
                tried.lacking += time_hits(
                    served, size, Room.of(size), decoders, got, lambda: self._left_s() > LEAST_S
                )
        finally:
            tried.facts += served.facts()
            tried.complaints = served.complaints()
        if tried.lacking:
            raise Wrong("; ".join(tried.lacking))

    @staticmethod
    def _timed(name: str, side: Side) -> Served:
        """Raises: NotHere for vLLM's own offloading where it does not start."""
        try:
            return side.get()
        except ServerError as error:
            if name != OFFLOADING:
                raise
            why = why_it_ended(str(error))
            raise NotHere(f"vLLM's own offloading does not start here: {why}") from error

    def _over(self, row: Row) -> None:
        """DRAM hits of the store over those of vLLM's own offloading, where both were timed."""
        ours, theirs = (_dram_ms(self.rows[f"hits {name}"]) for name in (STORE, OFFLOADING))
        if not ours.keys() & theirs.keys():
            raise NotHere(
                f"{len(ours)} kinds of hits were timed of one, {len(theirs)} of the other"
            )
        for (tokens, new), ms in ours.items():
            if (tokens, new) in theirs:
                name = f"DRAM hit over vLLM's own offloading, {tokens} tokens and {new} new"
                row.figures.append(Figure(name, ms / theirs[tokens, new]))

    def _throughput(self, row: Row, sides: Mapping[str, Side]) -> str:
        """By turns; nothing is asked twice."""
        served, remark = {}, ""
        for name in TIMED:
            try:
                served[name] = self._timed(name, sides[name])
            except NotHere as reason:
                remark = str(reason)
        speeds: dict[str, list[float]] = {name: [] for name in served}
        random, turns = Random(1), list(served)
        for number in range(ROUNDS):
            for name in turns:
                speed = served[name].tokens_per_s(random, self.setup.size.throughput_prompt)
                if number:
                    speeds[name].append(round(speed, 1))
            turns.reverse()
            row.tried.note("tokens per s", **speeds)
            self._write()
        for name, kind in ((STORE, "throughput"), (OFFLOADING, "")):
            if name in speeds:
                ratios = [a / b for a, b in zip(speeds[name], speeds[PLAIN], strict=True)]
                told = f"Throughput with nothing reused, {name} over neither"
                detail = {"ratios": [round(ratio, 4) for ratio in ratios]}
                row.figures.append(Figure(told, statistics.median(ratios), kind, detail))
        return remark


SALTS: Final = (None, NOISE)


def _dram_ms(row: Row) -> dict[tuple[int, int], float]:
    """Of hits that nothing ran beside, by tokens and new tokens."""
    alone = [figure.detail for figure in row.figures if not figure.detail["decoders"]]
    return {(of["tokens"], of["new"]): of["ttft_ms"]["DRAM"] for of in alone}
