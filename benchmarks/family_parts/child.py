# SPDX-License-Identifier: Apache-2.0
"""One run of benchmarks/families.py, in a process that it has to itself."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from attnstore_lab.testing.family_models import FAMILIES
from benchmarks.family_parts import registry
from tests.vllm.engine import larger_dummies
from tests.vllm.stand_ins import stand_in_for_torchvision

PROMPT, BRANCH, ANSWER, NEW = 2_000, 1_500, 40, 45
BLOCKS: Final = 384
CANDIDATES: Final = 5


def prompt(name: str, count: int) -> list[int]:
    random = Random(name)
    return [random.randrange(16, 1_000) for _ in range(count)]


def transfer(store: Path) -> dict[str, Any]:
    store.mkdir(parents=True, exist_ok=True)
    return {
        "kv_connector": "AttnStoreConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "dram": "512MiB", "nvme": {"path": str(store), "capacity": "1GiB"},
            "load_deadline": "60s", "compute_if_sooner": False, "audit": "off",
        },
    }  # fmt: skip


def start(name: str, models: Path, store: Path | None) -> Any:
    from vllm import LLM  # noqa: PLC0415
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    larger_dummies()
    if registry.needs_images(name):
        stand_in_for_torchvision(models / "stand_ins")
    if name in FAMILIES:
        found = FAMILIES[name].arguments(models)
    else:
        found = registry.arguments(name, models)
    if store is not None:
        found["kv_transfer_config"] = KVTransferConfig(**transfer(store))
    found = {"num_gpu_blocks_override": BLOCKS, **found}
    return LLM(**found, enforce_eager=True, disable_log_stats=False)


class Asking:
    """Requests one after the other, and what was found of each."""

    def __init__(self, llm: Any, *, resets: bool) -> None:
        self.llm = llm
        self.resets = resets
        """Vllm's own cache is emptied before each, so that what is found is the store's."""
        self.answers: list[list[Any]] = []
        self.found: list[int] = []

    def ask(self, tokens: Sequence[int]) -> list[int]:
        output = self.run(tokens)
        self.found.append(output.num_cached_tokens or 0)
        self.answers.append(content(output))
        return list(output.outputs[0].token_ids)

    def run(self, tokens: Sequence[int], salt: str = "") -> Any:
        from vllm import SamplingParams  # noqa: PLC0415

        if self.resets:
            self.llm.reset_prefix_cache()
        params = SamplingParams(
            temperature=0.0, max_tokens=ANSWER, logprobs=CANDIDATES, ignore_eos=True
        )
        what: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt:
            what["cache_salt"] = salt
        (output,) = self.llm.generate(what, params, use_tqdm=False)
        return output


def content(output: Any) -> list[Any]:
    """[token, {candidate: log-probability}] for each position."""
    part = output.outputs[0]
    return [
        [token, {str(name): found.logprob for name, found in position.items()}]
        for token, position in zip(part.token_ids, part.logprobs, strict=True)
    ]


def noise(asking: Asking, scheduler: Any, tokens: Sequence[int]) -> float:
    """The largest drift between computing the prompt at once and in two other splits."""
    if not scheduler.scheduler_config.enable_chunked_prefill:  # MLA here: it would wait for ever
        return 0.0
    usual, runs = scheduler.max_num_scheduled_tokens, []
    for split in (usual, BRANCH, 768):
        scheduler.max_num_scheduled_tokens = min(usual, split)
        runs.append(content(asking.run(tokens, salt=f"split {split}")))
    scheduler.max_num_scheduled_tokens = usual
    return max(drift(runs[0], other) for other in runs[1:])


def drift(a: Sequence[Any], b: Sequence[Any]) -> float:
    """The largest difference of a log-probability, up to the first token that differs.

    Args:
        a, b: [token, {candidate: log-probability}] for each position.
    """
    largest = 0.0
    for (token, here), (other, there) in zip(a, b, strict=True):
        both = [abs(here[name] - there[name]) for name in here if name in there]
        if not both or any(map(math.isnan, both)):
            return float("inf")
        largest = max(largest, *both)
        if token != other:
            break
    return largest


def run(name: str, models: Path, out: Path, log: Path, store: Path | None) -> None:
    """Ask one model, and write what came of it to `out`; all that is said goes to `log`."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(stream, sys.stdout.fileno())
    os.dup2(stream, sys.stderr.fileno())
    llm = start(name, models, store)
    core = llm.llm_engine.engine_core.engine_core
    groups = [
        f"{len(group.layer_names)} {type(group.kv_cache_spec).__name__}"
        for group in core.scheduler.kv_cache_config.kv_cache_groups
    ]
    asking = Asking(llm, resets=store is not None)
    first = prompt("first", PROMPT)
    answer = asking.ask(first)
    asking.ask(first)
    asking.ask([*first[:BRANCH], *prompt("branch", PROMPT - BRANCH)])
    asking.ask([*first, *answer, *prompt("turn", NEW)])
    found = {
        "groups": groups, "answers": asking.answers, "found": asking.found[1:],
        "dtype": str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
        "noise": noise(asking, core.scheduler, first),
    }  # fmt: skip
    out.write_text(json.dumps(found))
    llm.llm_engine.engine_core.shutdown()
