# SPDX-License-Identifier: Apache-2.0
"""A soak of a few hundred mixed requests, and proof that it would see wrong KV.

A long one: python -m tests.vllm.soak --requests N [--drafts]
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import soak
from tests.vllm.conftest import StartEngine

SEED = 11
REQUESTS = 200
FAULTS = ("wrong slot", "skipped layer")
OF_DOCUMENTS = ("documents lineage left out", "moved blocks not hidden")
PLAYS = 3
"""Of each fault of documents: an exact request meets wrong blocks only while they are in HBM."""


@pytest.mark.long
def test_soak(start_engine: StartEngine, models: Path) -> None:
    host = start_engine(**soak.PLAYING)
    played = host.call(soak.play, SEED, REQUESTS)
    faulty = {}
    for fault in FAULTS:
        host.call(soak.forget)
        faulty[fault] = host.call_with_fault(fault, soak.play, SEED, 25)
    reference = start_engine(**soak.REFERENCE)
    verdict = soak.judge(reference, played.jobs)
    print(verdict, played.counts, played.loaded, played.preemptions)

    assert verdict.wrong == []
    assert played.foreign == []
    assert verdict.answers >= REQUESTS
    assert min(played.loaded.values()) > 5000, "tokens of both tiers"
    assert played.preemptions > 0
    for event in ("evicted_dram", "evicted_nvme", "superseded"):
        assert played.counts[event] > 0, event
    for fault, play in faulty.items():
        assert soak.judge(reference, play.jobs, verdict.rounding).wrong, f"{fault} was not seen"


@pytest.mark.long
def test_soak_of_documents(start_engine: StartEngine, models: Path) -> None:
    """Exact requests go on from those that have documents in an order of their own."""
    host = start_engine(**{**soak.PLAYING, **soak.DOCUMENTS})
    played = host.call(soak.play, SEED, REQUESTS, documents=True)
    faulty: dict[str, list[soak.Play]] = {fault: [] for fault in OF_DOCUMENTS}
    for fault, plays in faulty.items():
        for seed in range(SEED, SEED + PLAYS):
            host.call(soak.forget)
            plays.append(host.call_with_fault(fault, soak.play, seed, REQUESTS, documents=True))
    reference = start_engine(**soak.REFERENCE, shape=soak.DEEP)
    verdict = soak.judge(reference, played.jobs)

    assert verdict.wrong == []
    assert played.foreign == []
    assert played.moved > 5000
    for fault, plays in faulty.items():
        jobs = [job for play in plays for job in play.jobs]
        assert soak.judge(reference, jobs, verdict.rounding).wrong, f"{fault} was not seen"
