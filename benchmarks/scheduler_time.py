# SPDX-License-Identifier: Apache-2.0
"""What a request costs the scheduler's thread: hash, look up, hold, plan, release.

    python -m benchmarks.scheduler_time [--tokens 4000] [--json] [--shared]

The real scheduler side over a real store (shared memory and a file), called as vLLM calls it,
without a model: no worker copies anything, so all that is timed is what a step would wait for.
Three kinds of request: one that nothing is stored of (its chunks are planned as saves), one
whose KV is in DRAM, and one that vLLM asks about again in the next step. `--shared` compares
processor time, by turns, with a shared tier on a real Redis and without one. Computing takes as
long there as on a GPU, so that the tier is worth a question; its answer is waited for inside the
look-up, as of every request that is alone, and to sleep and wake is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_lab.testing.small_store import open_scheduler, open_store
from attnstore_vllm.identity.weights import Weights
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.preflight import SLAB_NAME, lock_directory
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.tiers.nvme.format import SegmentHeader
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.start import MakeShared
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import Seen

Clock = Callable[[], float]
TOKENS_PER_S = 10_000
"""That a GPU computes of a prompt: here nothing is computed, and no question would be worth it."""
_CACHED: dict[bytes, int] = {}
"""vLLM's table of cached blocks. It is never reset here."""


@dataclass
class Times:
    """Milliseconds a request, by kind."""

    stored: list[float] = field(default_factory=list)
    hit: list[float] = field(default_factory=list)
    asked_again: list[float] = field(default_factory=list)


def make_scheduler(
    directory: Path, block_tokens: int, num_slots: int, more_tiers: Sequence[MakeShared] = ()
) -> Scheduler:
    geometry = Geometry.uniform(1, 1, block_tokens, 4096 * block_tokens // 16, 256)
    lock = lock_directory(directory)
    pool = SharedPool(
        f"attnstore-bench-{os.getpid()}", num_slots, geometry.slot_bytes, num_ranks=1, member=1
    )
    pool._path.unlink()
    capacity = 2 * num_slots * (geometry.slot_bytes + 8192)
    shape = SegmentHeader(-1, 256, geometry.slot_bytes, bytes(32), b"", 0, "benchmark")
    slab = open_slab(directory / SLAB_NAME, capacity, shape)
    device, _ = open_device(slab.path, 64, "auto")
    store = open_store(pool, slab, device, more_tiers=more_tiers)
    if store.remote is not None:
        store.remote.weights_seen(True)
    return open_scheduler(store, geometry, Weights(bytes(32), b""), lock=lock)


def make_request(name: int, tokens: list[int]) -> Any:
    return SimpleNamespace(
        request_id=str(name),
        all_token_ids=tokens,
        prompt_token_ids=tokens,
        prompt_embeds=None,
        sampling_params=SimpleNamespace(
            prompt_logprobs=None, skip_reading_prefix_cache=False, extra_args=None
        ),
        skip_reading_prefix_cache=False,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        kv_transfer_params=None,
        num_prompt_tokens=len(tokens),
        resumable=False,
        num_tokens=len(tokens),
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_preemptions=0,
    )


def report_of(plan: Any, ranks: Counter[int] | None = None) -> StepReport:
    """Workers look at the weights when they are told to, as those of a server do."""
    weights = Seen.SAME if plan.looks_at_weights else Seen.NOTHING
    return StepReport(plan.number, ranks or Counter(), weights=weights)


def step_of(tokens: dict[str, int]) -> Any:
    """A SchedulerOutput of requests that have just begun."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=None,
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=0) for r in tokens],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        scheduled_spec_decode_tokens={},
    )


def timed(call: Callable[[], Any], clock: Clock = time.perf_counter) -> tuple[float, Any]:
    started = clock()
    result = call()
    return (clock() - started) * 1000, result


def one_request(
    scheduler: Scheduler, request: Any, block_tokens: int, clock: Clock = time.perf_counter
) -> tuple[float, float, int]:
    """Run a request through all hooks; returns (ms, ms of a second ask, tokens offered)."""
    blocks = list(range(-(-request.num_tokens // block_tokens)))
    scheduler.bind_kv_cache_manager(
        SimpleNamespace(
            get_block_ids=lambda _: (blocks,),
            block_pool=SimpleNamespace(
                cached_block_hash_to_block=_CACHED,
                hash_block_size=block_tokens,
                get_num_free_blocks=lambda: 0,
            ),
        )
    )

    def come() -> int | None:
        scheduler.on_new_request(request)
        return ask()

    def ask() -> int | None:
        offered: int | None = scheduler.get_num_new_matched_tokens(request, 0)[0]
        return offered

    came_ms, offered = timed(come, clock)
    deadline = time.monotonic() + 5.0
    while offered is None:  # the shared tier has not answered yet: vLLM asks in its next step
        assert time.monotonic() < deadline, "vLLM is told to wait for more than 5 s"
        scheduler.on_report(report_of(scheduler.build_step(step_of({}))))
        time.sleep(0.001)
        ms, offered = timed(ask, clock)
        came_ms += ms
    again_ms, _ = timed(ask, clock)

    def run() -> Any:
        scheduler.update_state_after_alloc(request, (blocks,), offered)
        request.num_computed_tokens = offered
        rest = request.num_tokens - offered
        return scheduler.build_step(step_of({request.request_id: rest}))

    ran_ms, plan = timed(run, clock)
    request.num_computed_tokens = request.num_tokens
    ended_ms, _ = timed(lambda: scheduler.request_finished(request, (blocks,)), clock)
    scheduler.on_report(report_of(plan))
    tail = scheduler.build_step(step_of({}))
    ids = [p.plan_id for step in (plan, tail) for p in (*step.loads, *step.saves)]
    report = report_of(tail, Counter(ids))
    reported_ms, _ = timed(lambda: scheduler.on_report(report), clock)
    return came_ms + ran_ms + ended_ms + reported_ms, again_ms, offered


def measure(num_tokens: int, block_tokens: int, rounds: int) -> Times:
    random = Random(0)
    times = Times()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        scheduler = make_scheduler(Path(directory) / "store", block_tokens, num_slots=256)
        for i in range(rounds):
            tokens = [random.randrange(50_000) for _ in range(num_tokens)]
            ms, _, offered = one_request(scheduler, make_request(2 * i, tokens), block_tokens)
            assert offered == 0
            times.stored.append(ms)
            hit = make_request(2 * i + 1, tokens)
            ms, again_ms, offered = one_request(scheduler, hit, block_tokens)
            assert num_tokens - offered <= 256  # all whole chunks
            times.hit.append(ms)
            times.asked_again.append(again_ms)
        scheduler.close()
    return times


def measure_shared(num_tokens: int, rounds: int) -> dict[str, Times]:
    """Processor time of this thread with the shared tier and without it, request by request."""
    random, block_tokens = Random(0), 16
    times = {"on": Times(), "off": Times()}
    network = NetworkStore("redis", memory=1 << 30)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        tier = MakeShared(
            network.settings,
            keys=SharedKeys.of(None),
            namespace=bytes(32),
            where="the benchmark's Redis",
            chunk_tokens=256,
            deadline_s=0.5,
            directory=None,
        )
        schedulers = {
            name: make_scheduler(Path(directory) / name, block_tokens, 256, more)
            for name, more in {"on": [tier], "off": []}.items()
        }
        for scheduler in schedulers.values():
            scheduler.store.weigh_reads(lambda start, stop: (stop - start) / TOKENS_PER_S)
        time.sleep(2.0)  # the tier joins
        for i in range(rounds):
            tokens = [random.randrange(50_000) for _ in range(num_tokens)]
            # Who comes first reads tokens that nobody has read: they take turns at it.
            for name, scheduler in list(schedulers.items())[:: 1 if i % 2 else -1]:
                for number, kind in ((2 * i, times[name].stored), (2 * i + 1, times[name].hit)):
                    request = make_request(number, tokens)
                    ms, again, _ = one_request(scheduler, request, block_tokens, time.thread_time)
                    kind.append(ms)
                times[name].asked_again.append(again)
        for scheduler in schedulers.values():
            scheduler.close()
    network.kill()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else ""
    )
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--shared", action="store_true", help="with a shared tier over without")
    args = parser.parse_args()
    if args.shared:
        found = measure_shared(args.tokens, args.rounds)
        for kind in ("stored", "hit", "asked_again"):
            on, off = (statistics.median(getattr(found[name], kind)) for name in ("on", "off"))
            print(f"{kind}: {on:.3f} ms with a shared tier, {off:.3f} without: {on / off:.3f}")
        return
    result: dict[str, Any] = {"tokens": args.tokens, "rounds": args.rounds}
    for block_tokens in (16, 128):
        times = measure(args.tokens, block_tokens, args.rounds)
        result[f"block_{block_tokens}"] = {
            kind: round(statistics.median(values), 3) for kind, values in vars(times).items()
        }
    if args.json:
        print(json.dumps(result))
        return
    print(f"scheduler-side time of a request of {args.tokens} tokens, median ms of {args.rounds}")
    print(f"{'block':>6} {'nothing stored':>15} {'hit in DRAM':>12} {'asked again':>12}")
    for block_tokens in (16, 128):
        row = result[f"block_{block_tokens}"]
        print(
            f"{block_tokens:>6} {row['stored']:>15.3f} {row['hit']:>12.3f} "
            f"{row['asked_again']:>12.3f}"
        )


if __name__ == "__main__":
    main()
