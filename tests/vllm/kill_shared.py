# SPDX-License-Identifier: Apache-2.0
"""Two real servers under load share a network store, and all of them meet faults at random.

    python -m tests.vllm.kill_shared --kind redis --faults 20

Clients of both servers hold the same conversations, so that each server goes on with what the
other wrote. Meanwhile a server, its child process or the store is killed; the store is stopped
for 30 s, filled, emptied, damaged, or reached over a slow network. Of Mooncake, one of the two
processes that hold the values is killed. Each fault ends, and the tier has to be in use again by
itself. No request may fail or hang, and metrics have to tell of it. At the end answers are
compared with those of an engine that has no store.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attnstore_lab.testing.network_stores import KINDS, NetworkStore, missing
from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.prometheus import total
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm import soak
from tests.vllm.kill_loop import judge
from tests.vllm.load import Load
from tests.vllm.slow_network import SlowNetwork

DEADLINE_MS = 500
STOPPED_S = 30.0
BEFORE_S, AFTER_S = (0.5, 4.0), (3.0, 6.0)
SLOWEST_S = 20.0
"""Of one request. Four clients of two servers wait for each other on the cores of this machine;
while a server starts beside them, too."""
STORE_BYTES = 64 << 20
SERVER_FAULTS = ("kill server 0", "kill server 1", "kill child 0", "kill child 1")
STORE_FAULTS = ("kill store", "stop store")
OF_KIND = {
    "redis": ("damage", "swap", "foreign", "empty", "full", "password", "slow", "broken"),
    "mooncake": ("kill owner",),
}


_FAILS = ("shared_out", "shared_late", "shared_read_failed", "shared_write_failed")
TOLD_BY = {
    "kill child": _FAILS,
    "kill store": _FAILS,
    "kill owner": _FAILS,
    "stop store": _FAILS,
    "damage": ("shared_corrupt",),
    "swap": ("shared_corrupt",),
    "foreign": ("shared_corrupt",),
    "full": _FAILS,
    "password": _FAILS,
    "slow": _FAILS,
    "broken": _FAILS,
}
"""The errors by which metrics tell of a fault: one of them has to be counted."""
TOLD_S = 30.0
"""Until then the load goes on: what was damaged is told of when somebody reads it."""
KEYS_MIN = 8
"""Values that have to be there before they are damaged."""


class CommonAuthor(soak.Author):
    """Written and heard by the clients of several servers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._own = threading.Lock()

    def write(self) -> soak.Job:
        with self._own:
            return super().write()

    def heard(self, job: soak.Job) -> None:
        with self._own:
            super().heard(job)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and what was seen of it."""

    what: str
    answered: int
    slowest_s: float
    seen: dict[str, float]
    """Counters of the shared tier that moved, of both servers."""


class Cluster:
    """Two servers, one store, and a network between them that can be bad."""

    def __init__(self, kind: str, directory: Path, models: Path) -> None:
        self._directory = directory
        self._model = make_model(models / "serve", TINY)
        self.store = NetworkStore(kind, memory=STORE_BYTES, owners=2)
        self.network = SlowNetwork(self.store.port) if kind == "redis" else None
        self.servers: list[VllmServer] = []
        self._starts = 0
        for number in range(2):
            self.servers.append(self._start(number))

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        if self.network is not None:
            self.network.close()
        self.store.kill()

    def _start(self, number: int) -> VllmServer:
        where: dict[str, Any] = (
            {"mooncake": {"master": f"127.0.0.1:{self.store.port}"}}
            if self.network is None
            else {"redis": f"redis://127.0.0.1:{self.network.port}"}
        )
        # Little room of its own: what the other one wrote is asked for.
        given = serving.settings(self._directory / f"store{number}", "8MiB", "16MiB")
        given["shared"] = {**where, "deadline": f"{DEADLINE_MS}ms"}
        self._starts += 1
        log = self._directory / f"log{self._starts}"
        made = serving.server(
            self._model, log, serving.FLAG, serving.in_json(given), cores=str(number)
        )
        made.__enter__()
        return made

    def restart(self, number: int) -> None:
        os.killpg(self.servers[number].pid, signal.SIGKILL)
        serving.exit_code(self.servers[number])
        self.servers[number].stop()
        self.servers[number] = self._start(number)

    def kill_child(self, number: int) -> None:
        for process in serving.members(self.servers[number].pid):
            if "attnstore_vllm.tiers.shared.child" in " ".join(process.cmdline()):
                process.kill()

    def counters(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for server in self.servers:
            for (name, labels), value in server.metrics().items():
                if not name.startswith("vllm:attnstore_") or not name.endswith("_total"):
                    continue
                for kind in dict(labels).values():
                    if "shared" in kind:
                        key = f"{name[15:-6]} {kind}"
                        found[key] = found.get(key, 0) + value
        return found

    def until_in_use(self) -> None:
        for server in self.servers:
            serving.nudge(server)  # it joins after the workers have looked at their weights
            for way in ("reads", "writes"):
                serving.wait_until(
                    lambda server=server, way=way: total(  # type: ignore[misc]
                        server.metrics(), "vllm:attnstore_shared_in_use", direction=way
                    ),
                    f"the shared tier is in use again: {way}",
                    poll_s=0.5,
                )


# ---- faults: each returns what ends it -------------------------------------------------------


def bring(cluster: Cluster, what: str, random: Random) -> Callable[[], object]:
    kind, _, number = what.rpartition(" ")
    store = cluster.store
    if kind == "kill server":
        cluster.restart(int(number))
    elif kind == "kill child":
        cluster.kill_child(int(number))
    elif what == "kill store":
        store.kill()
        return store.start
    elif what == "kill owner":  # of one half of the values; the master goes on naming them
        store.kill_owner()
        return store.start_owner
    elif what == "stop store":
        store.signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        return lambda: store.signal(signal.SIGCONT)
    elif what in ("slow", "broken"):
        assert cluster.network is not None
        if what == "slow":
            cluster.network.delay_s, cluster.network.loss = 0.03, 0.1
        else:
            cluster.network.breaks = 0.05
        return cluster.network.well
    else:
        return _with_redis(store.port, what, random)
    return lambda: None


def _with_redis(port: int, what: str, random: Random) -> Callable[[], object]:
    import redis

    client = redis.Redis(port=port)
    if what == "empty":  # also of the generation that all engines share
        client.flushdb()
    elif what == "full":
        client.config_set("maxmemory", "1mb")
        return partial(client.config_set, "maxmemory", str(STORE_BYTES))
    elif what == "password":
        client.config_set("requirepass", "another")
        for one in client.client_list():
            if one["id"] != str(client.client_id()):
                client.client_kill_filter(_id=one["id"])
        return partial(client.config_set, "requirepass", "")
    else:
        client.config_set("maxmemory", "0")  # a full Redis refuses what changes values
        _change(client, what, random)
        client.config_set("maxmemory", str(STORE_BYTES))
    return lambda: None


def _change(client: Any, what: str, random: Random) -> None:
    """Make all values wrong ones."""
    keys = _values(client)
    if what == "damage":
        for key in keys:
            client.setrange(key, random.randrange(client.strlen(key) - 8), secrets.token_bytes(8))
    elif what == "swap":
        values = client.mget(keys)
        for key, value in zip(keys, [*values[1:], *values[:1]], strict=True):
            client.set(key, value or b"")
    elif what == "foreign":  # of another version: the header's first bytes are others
        for key in keys:
            client.setrange(key, 0, b"ANOTHER1")
    else:
        raise AssertionError(what)


def _values(client: Any) -> list[bytes]:
    """Names of what both servers have written, once there is enough of it."""
    deadline = time.monotonic() + TOLD_S
    while True:
        keys = [key for key in client.keys("as1/*") if client.type(key) == b"string"]
        keys = [key for key in keys if client.strlen(key) > 4096]  # no generation
        if len(keys) >= KEYS_MIN or time.monotonic() > deadline:
            return keys
        time.sleep(0.2)


# ---- the story ---------------------------------------------------------------------------------


def live(
    kind: str, directory: Path, faults: int, seed: int, only: Sequence[str]
) -> tuple[list[Fault], list[soak.Job]]:
    random, author = Random(seed), CommonAuthor(seed)
    cluster = Cluster(kind, directory, directory)
    jobs: list[soak.Job] = []
    seen: list[Fault] = []
    known = [*SERVER_FAULTS, *STORE_FAULTS, *OF_KIND[kind]]
    known = [what for what in known if not only or what in only]
    order = [
        what for _ in range(-(-faults // len(known))) for what in random.sample(known, len(known))
    ]
    try:
        cluster.until_in_use()
        for what in order[:faults]:
            seen.append(_meet(cluster, what, random, author, jobs))
            print(seen[-1], flush=True)
    finally:
        cluster.close()
    return seen, jobs


def _meet(
    cluster: Cluster, what: str, random: Random, author: soak.Author, jobs: list[soak.Job]
) -> Fault:
    before = cluster.counters()
    loads = [Load(server, author) for server in cluster.servers]
    time.sleep(random.uniform(*BEFORE_S))
    if what.startswith("kill server"):
        loads[int(what[-1])].stop_asking()
    end = bring(cluster, what, random)
    time.sleep(random.uniform(*AFTER_S))
    tells = TOLD_BY.get(what.rstrip(" 01"), ())
    deadline = time.monotonic() + TOLD_S
    while tells and not _is_told(cluster, before, tells) and time.monotonic() < deadline:
        time.sleep(0.5)
    end()
    for load in loads:
        load.end()
        assert not load.failures, (what, load.failures)
        jobs += load.jobs
    slowest = max(load.slowest_s for load in loads)
    assert slowest <= SLOWEST_S, f"{what}: a request took {slowest:.1f} s"
    cluster.until_in_use()
    after = cluster.counters()
    moved = {key: after[key] - before.get(key, 0) for key in sorted(after)}
    told = not tells or _is_told(cluster, before, tells)
    assert told, f"{what}: metrics say nothing of it: {moved}"
    return Fault(
        what,
        sum(len(load.jobs) for load in loads),
        round(slowest, 2),
        {key: value for key, value in moved.items() if value > 0},
    )


def _is_told(cluster: Cluster, before: dict[str, float], tells: Sequence[str]) -> bool:
    now = cluster.counters()
    return any(
        now.get(key, 0) > before.get(key, 0) for key in (f"errors {error}" for error in tells)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults of a shared tier, with real servers.")
    parser.add_argument("--kind", choices=KINDS, default="redis")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=(), metavar="FAULT", help="these alone")
    parser.add_argument(
        "--judged", type=int, default=3000, help="answers that are computed again, at most"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if reason := missing(options.kind):
        raise SystemExit(f"{options.kind}: {reason}")
    with tempfile.TemporaryDirectory(prefix="attnstore-kill-", dir="/var/tmp") as name:
        directory = Path(name)
        seen, jobs = live(options.kind, directory, options.faults, options.seed, options.only)
        verdict = judge(directory, directory, jobs, at_most=options.judged)
    print(verdict)
    report = {"faults": [asdict(fault) for fault in seen], "verdict": asdict(verdict)}
    out = options.out or Path(f"results/kill_shared_{options.kind}.json")
    out.write_text(json.dumps(report, indent=1) + "\n")
    if verdict.wrong:
        raise SystemExit(f"WRONG: answers {verdict.wrong}")


if __name__ == "__main__":
    main()
