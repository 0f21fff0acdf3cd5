# SPDX-License-Identifier: Apache-2.0
"""Four real servers behind round robin with a shared tier, over one server with all of it.

    python -m benchmarks.round_robin [--kind redis|mooncake|both] [--servers N]

Clients hold the same conversations twice: with one server, and with N servers that get the
requests in turn, so that a conversation nearly always goes on at another one. The one server has
the DRAM and NVMe of all N. Lengths are drawn: they do not end where chunks end.

Found is the share of prompt tokens that were not computed; `ceiling` is what would be found if all
that turns before have left were kept, and shared in whole chunks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.network_stores import KINDS, NetworkStore, missing
from attnstore_lab.testing.tiny_model import SMALL, make_model
from attnstore_vllm.prometheus import total
from benchmarks.peers import PROMPT_TOKENS, SETTLED_S, complete
from benchmarks.server import NO_AUDIT, VllmServer
from benchmarks.shared_tier import CHUNK_TOKENS, settings_of

ROOT = Path(__file__).resolve().parent.parent
FIRST, MORE, ANSWER = (400, 1200), (100, 600), (16, 128)
"""Tokens of a first message, of each later one, and of an answer: at least, at most."""
PAUSE_S = 2.0
"""Before each later turn: nobody reads and writes sooner."""
CLIENTS = 4
DRAM, NVME = 64 << 20, 256 << 20
"""Of each of the N servers, in bytes."""
STORE_BYTES = 2 << 30
SOURCES = ("hbm", "dram", "nvme", "shared", "computed")


def server_of(name: str, tiers: int, shared: str, model: Path, work: Path) -> VllmServer:
    """One that has the room of so many servers."""
    config = work / f"{name}.yaml"
    config.write_text(
        f"dram: {tiers * DRAM}\nnvme: {{path: {work / name}, capacity: {tiers * NVME}}}\n"
        f"compute_if_sooner: false\n{NO_AUDIT}{shared}"
    )
    arguments = ["--max-model-len", "4096", "--num-gpu-blocks-override", "64"]
    arguments += ["--kv-transfer-config", str(config)]
    return VllmServer(str(model), arguments, work / f"{name}.log")


def hold(servers: Sequence[VllmServer], chats: int, turns: int) -> tuple[int, int]:
    """Hold all conversations, and return the prompt tokens, and those of `ceiling`."""
    following = itertools.cycle(servers)
    own = threading.Lock()
    sizes = [0, 0]
    progress = tqdm(total=chats * turns, desc=f"{len(servers)} servers", unit="turn")

    def chat(number: int) -> None:
        random = Random(number)

        def tokens(bounds: tuple[int, int]) -> list[int]:
            return [random.randrange(300, 1000) for _ in range(random.randint(*bounds))]

        history, known = tokens(FIRST), 0
        for turn in range(turns):
            if turn:
                time.sleep(PAUSE_S)
            with own:
                server = next(following)
                sizes[0] += len(history)
                sizes[1] += known // CHUNK_TOKENS * CHUNK_TOKENS
                progress.update()
            answer, _ = complete(server, history, random.randint(*ANSWER))
            known = len(history) + len(answer) - 1  # nobody has computed the last token's KV
            history = [*history, *answer, *tokens(MORE)]

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(chat, range(chats)))
    progress.close()
    return sizes[0], sizes[1]


def measure(
    count: int, store: NetworkStore | None, model: Path, work: Path, chats: int, turns: int
) -> dict[str, Any]:
    """Of so many servers, or of one that has all their room."""
    shared = f"shared: {settings_of(store)}\n" if store is not None else ""
    number = count if store is not None else 1
    with ExitStack() as running:
        servers = [
            running.enter_context(
                server_of(f"{number}-{one}", count // number, shared, model, work)
            )
            for one in range(number)
        ]
        for server in servers:  # the workers have looked at their weights, the tier has joined
            complete(server, [20, 21], 1)
        time.sleep(PAUSE_S)
        before = by_source(servers)
        prompts, ceiling = hold(servers, chats, turns)
        time.sleep(SETTLED_S)
        for server in servers:
            complete(server, [20, 21], 1)
        time.sleep(PAUSE_S)  # figures of an idle server come once a second
        found = {key: value - before[key] for key, value in by_source(servers).items()}
    counted = sum(found.values())
    assert abs(counted - prompts) <= 8 * number, f"{counted} tokens counted, {prompts} sent"
    return {
        "servers": number,
        "prompt_tokens_by_source": found,
        "found": round(1 - found["computed"] / counted, 4),
        "ceiling": round(ceiling / prompts, 4),
    }


def by_source(servers: Sequence[VllmServer]) -> dict[str, float]:
    metrics = [server.metrics() for server in servers]
    return {
        source: sum(total(each, PROMPT_TOKENS, source=source) for each in metrics)
        for source in SOURCES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Servers behind round robin with a shared tier.")
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "round_robin.json")
    args = parser.parse_args()
    kinds = KINDS if args.kind == "both" else [args.kind]
    for kind in kinds:
        if reason := missing(kind):
            raise SystemExit(f"{kind}: {reason}")
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / "model", SMALL)
        given = (model, work, args.chats, args.turns)
        report["one"] = measure(args.servers, None, *given)
        for kind in kinds:
            store = NetworkStore(kind, memory=STORE_BYTES, owners=2)
            try:
                (work / kind).mkdir()
                report[kind] = measure(args.servers, store, model, work / kind, *given[2:])
            finally:
                store.kill()
            report[kind]["over_one"] = round(report[kind]["found"] / report["one"]["found"], 3)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
