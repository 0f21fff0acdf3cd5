# SPDX-License-Identifier: Apache-2.0
"""An engine with the store, in a process of its own, that is asked document_cases.py's prompts.

    python -m benchmarks.quality.document_engine WORK.json FOUND.json

An answer is greedy, or forced: a logits processor lets the model say given tokens alone, and vLLM
tells the log-probability and rank that they had. (The connector does not serve requests for
log-probabilities of the prompt.) All is in float32, so that rounding decides next to nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.quality.document_cases import ANSWER, DOCUMENTS, LENGTH, Case
from benchmarks.quality.served import BESIDE, MOVED

REPORT = {"attnstore": {"report": True}}
AT_ONCE = 16
"""Cases whose documents are stored, then asked for: all fits into DRAM."""
SETTLE_S, PAUSE_S = 60.0, 0.01
BLOCK = 128
SHORT = 8
"""Tokens of each document that may be missing at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to serve the prompts.

    stored: "" computes all; "prompt" loads it in its place; "behind" and "alone" are how the
    documents were computed. recompute, recompute_by: truncation's. fault: of FAULTS, a check that
    can fail.
    """

    name: str
    stored: str = ""
    recompute: float | str = "off"
    recompute_by: str = "first"
    fault: str = ""

    def is_served(self, said: Said) -> bool:
        """Whether as much came from the store as should have."""
        if self.stored == "prompt":
            return said.reused >= DOCUMENTS * LENGTH - BLOCK
        share = self.recompute if isinstance(self.recompute, float) else 0.0
        return said.moved >= DOCUMENTS * (LENGTH * (1 - share) - 1 - SHORT)


@dataclass(frozen=True, slots=True)
class Said:
    """tokens: as chosen, or as forced. losses: nats. ranks: from 1. moved, reused,
    passed: tokens of the prompt; reused ones may be in HBM, too; passed are those of own passes."""

    tokens: list[int]
    losses: list[float]
    ranks: list[int]
    moved: int
    reused: int
    passed: int


def start(model: Path, window: int, store: Path, row: Row) -> Any:
    """An engine with the settings of this row."""
    from vllm import LLM  # noqa: PLC0415
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    settings = {
        "dram": "512MiB", "nvme": {"path": str(store), "capacity": "1GiB"},
        "load_deadline": "60s", "compute_if_sooner": False, "audit": "off",
        "truncation": {"documents": True, "min_tokens": 32, "recompute": row.recompute,
                       "recompute_by": row.recompute_by},
    }  # fmt: skip
    transfer = KVTransferConfig(
        kv_connector="AttnStoreConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )  # fmt: skip
    return LLM(
        str(model), dtype="float32", max_model_len=window, enforce_eager=True, max_num_seqs=AT_ONCE,
        num_gpu_blocks_override=256, kv_transfer_config=transfer, async_scheduling=False,
        gpu_memory_utilization=0.2,
        logits_processors=[_forcing()],
    )  # fmt: skip


def _forcing() -> Any:
    import torch  # noqa: PLC0415
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor  # noqa: PLC0415

    class Forces(AdapterLogitsProcessor):
        """Lets a request say the tokens of its extra argument `forced`, and no others."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Callable[..., torch.Tensor] | None:
            forced = (params.extra_args or {}).get("forced")
            if forced is None:
                return None

            def force(said: list[int], logits: torch.Tensor) -> torch.Tensor:
                only = torch.full_like(logits, -torch.inf)
                only[forced[len(said)]] = 0.0
                return only

            return force

    return Forces


def leave_gaps_out() -> None:
    """In this process no pass of our own computes anything from now on."""
    from attnstore_vllm.connector.own_pass import OwnPass  # noqa: PLC0415

    OwnPass.compute = lambda *_: None  # type: ignore[method-assign]


def leave_keys_as_they_are() -> None:
    """In this process K that is moved is not turned to its new position from now on."""
    from attnstore_vllm.transfer import engine  # noqa: PLC0415

    numbers = engine.rotation_numbers

    def unturned(*args: Any) -> dict[str, Any]:
        found = numbers(*args)
        return found | {"theta": [0.0] * len(found["theta"])}

    engine.rotation_numbers = unturned  # type: ignore[assignment]


FAULTS = {"gaps left out": leave_gaps_out, "K not turned": leave_keys_as_they_are}
"""Planted: reuse that any measure must see."""


class Asker:
    """Requests to one engine, many at a time."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        salts: Sequence[str],
        hints: dict[str, Any],
        forced: Sequence[list[int] | None] | int,
    ) -> list[Said]:
        """salts: keep cases from each other's KV. forced: what each must say, None where it is
        free; a number: so many tokens."""
        from vllm import SamplingParams  # noqa: PLC0415

        each = [None] * len(prompts) if isinstance(forced, int) else forced
        free = forced if isinstance(forced, int) else ANSWER
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=len(one) if one else free, ignore_eos=True, logprobs=1,
                detokenize=False,
                extra_args={"kv_transfer_params": hints, **({"forced": one} if one else {})},
            )
            for one in each
        ]  # fmt: skip
        what = [
            {"prompt_token_ids": list(one), "cache_salt": salt}
            for one, salt in zip(prompts, salts, strict=True)
        ]
        return [_said(output) for output in self.llm.generate(what, params, use_tqdm=False)]

    def settle(self) -> None:
        """Wait until what was asked is stored, and empty HBM: a prompt that comes too early would
        be computed, and found in its place from then on. Raises: RuntimeError."""
        core: Any = self.llm.llm_engine.engine_core.engine_core
        store, deadline = core.scheduler.connector.scheduler.store, time.monotonic() + SETTLE_S
        while core.scheduler.has_requests() or not store.is_idle():  # saves hold blocks
            if time.monotonic() > deadline:
                raise RuntimeError(f"the store does not come to rest within {SETTLE_S:g} s")
            if core.scheduler.has_requests():
                self.llm.llm_engine.step()
            else:
                time.sleep(PAUSE_S)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM still holds blocks")


def _said(output: Any) -> Said:
    tokens = list(output.outputs[0].token_ids)
    heard = [by_token[t] for t, by_token in zip(tokens, output.outputs[0].logprobs, strict=True)]
    report = (output.kv_transfer_params or {}).get("attnstore", {})
    reused = report.get("prompt_tokens", 0) - report.get("computed_tokens", 0)
    losses, ranks = [-one.logprob for one in heard], [one.rank for one in heard]
    moved, passed = report.get("moved_tokens", 0), report.get("own_pass_tokens", 0)
    return Said(tokens, losses, ranks, moved, reused, passed)


def ask_all(llm: Any, row: Row, cases: Sequence[Case], first: int) -> list[Said]:
    """For each case a forced answer; and, behind those, for each text a greedy one.

    first: the number of the first case.
    Raises: RuntimeError if documents were not served from the store.
    """
    asker = Asker(llm)
    salts = [f"{row.name} {first + n}" for n in range(len(cases))]
    prompts = [case.prompt for case in cases]
    texts = [n for n, case in enumerate(cases) if not case.hops]
    forced = [*(case.forced for case in cases), *(None for _ in texts)]

    def every(hints: dict[str, Any]) -> list[Said]:
        asked = [*range(len(cases)), *texts]
        return asker.ask([prompts[n] for n in asked], [salts[n] for n in asked], hints, forced)

    if not row.stored:
        return every(BESIDE)
    if row.stored == "prompt":
        ahead = list(zip(prompts, salts, strict=True))
        hints = REPORT
    else:
        alone, hints = row.stored == "alone", MOVED
        pairs = zip(cases, salts, strict=True)
        ahead = [(one, salt) for case, salt in pairs for one in case.ahead(alone=alone)]
    asker.ask([one for one, _ in ahead], [salt for _, salt in ahead], hints, 1)
    asker.settle()
    found = every(hints)
    if short := [one for one in found if not row.is_served(one)]:
        raise RuntimeError(f"{row.name}: {len(short)} prompts did not come from the store: {short}")
    return found


def run(work: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """All rows of one engine; by row's name the answers, cases first, then greedy ones."""
    rows = [Row(**row) for row in work["rows"]]
    cases = [Case(**case) for case in work["cases"]]
    if rows[0].fault:
        FAULTS[rows[0].fault]()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as name:
        llm = start(Path(work["model"]), work["window"], Path(name), rows[0])
        for row in rows:
            forced: list[Said] = []
            greedy: list[Said] = []
            for at in tqdm(range(0, len(cases), AT_ONCE), desc=row.name, unit="batch"):
                some = cases[at : at + AT_ONCE]
                said = ask_all(llm, row, some, at)
                forced += said[: len(some)]
                greedy += said[len(some) :]
            found[row.name] = [asdict(one) for one in forced + greedy]
        llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(run(work)), encoding="utf-8")


if __name__ == "__main__":
    main()
