# SPDX-License-Identifier: Apache-2.0
"""A pass of our own that fails on one of two ranks: what they compute together must stay paired.

Method: two processes of torch.distributed. A pass adds up over the ranks, as a model's layers do;
vLLM's own step comes next and adds up too. On rank 1 the pass raises before it does so.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.scheduler.messages import StepPlan
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.plan import PassPlan

OF_PASS, OF_STEP = 1000.0, 1.0
PLAN = PassPlan("a", (), ((1,),))


def worker_of(rank: int, num_ranks: int, compute: Any, *, has_failed: bool = False) -> Worker:
    """One that has heard the plan of a step with a pass."""
    pool: Any = SimpleNamespace(num_slots=2)
    passes: Any = SimpleNamespace(compute=compute)
    geometry = Geometry(num_ranks, (64,), (Group(4, ("l",)),), 16)
    worker = Worker(pool, rank, geometry, 2, write_buffer_bytes=lambda _: 0, passes=passes)
    loads: Any = SimpleNamespace(
        fail=lambda _: None, begin_step=lambda *_, **__: None, has_failed=lambda _: has_failed
    )
    worker.loads = loads
    worker.begin_step(StepPlan(passes=[PLAN]))
    return worker


def fails(_: PassPlan) -> None:
    raise RuntimeError("CUDA out of memory, on this rank alone")


def run(rank: int, store: Path, results: Any) -> None:
    """A step of one rank: its result is the sum that vLLM's own pass has found."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )

    def add_up(value: float) -> float:
        tensor = torch.full((4,), value)
        torch.distributed.all_reduce(tensor)
        return float(tensor[0])

    def compute(_: PassPlan) -> None:
        add_up(OF_PASS)

    worker = worker_of(rank, 2, fails if rank == 1 else compute)
    try:
        worker.start_load()
        results.put((rank, add_up(OF_STEP)))
    except RuntimeError:
        results.put((rank, None))  # vLLM ends the engine


def test_a_pass_that_fails_on_one_rank_gives_no_wrong_sum(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [
        context.Process(target=run, args=(rank, tmp_path / "ranks", results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        rank, found = results.get(timeout=120)
        assert rank == 1, "the other one waits for it"
        assert found is None, f"vLLM's own step has added {found - OF_STEP} of another rank's pass"
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_only_a_rank_that_is_alone_goes_on(num_ranks: int) -> None:
    worker = worker_of(0, num_ranks, fails)
    if num_ranks == 1:
        worker.start_load()
    else:
        with pytest.raises(RuntimeError, match="on this rank alone"):
            worker.start_load()


@pytest.mark.parametrize(("num_ranks", "passes"), [(1, []), (2, [PLAN])])
def test_one_of_several_ranks_skips_no_pass(num_ranks: int, passes: list[PassPlan]) -> None:
    """A load that failed there is not known to the others: they would wait in the pass."""
    made: list[PassPlan] = []
    worker_of(0, num_ranks, made.append, has_failed=True).start_load()
    assert made == passes
