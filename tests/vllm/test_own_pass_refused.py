# SPDX-License-Identifier: Apache-2.0
"""Engines that make no passes of their own say why, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.connector.own_pass import why_no_passes

REFUSED = [
    ({"pipeline_parallel_size": 2}, "it has pipeline stages"),
    ({"decode_context_parallel_size": 2}, "its ranks share out a prompt"),
    ({"prefill_context_parallel_size": 2}, "its ranks share out a prompt"),
    ({"data_parallel_size": 2}, "data-parallel ranks compute experts together"),
    ({"use_ubatching": True}, "its steps are cut into micro-batches"),
    ({"lora_config": object()}, "it has LoRA adapters"),
    ({"speculative_config": object()}, "it has drafts"),
    ({"is_multimodal_model": True}, "its model takes pictures or sounds"),
    ({"enable_prompt_embeds": True}, "its prompts may be embeddings"),
    ({"offload_group_size": 2}, "its weights are offloaded"),
    ({"cpu_offload_gb": 0.5}, "its weights are offloaded"),
    ({"num_groups": 2}, "it has several KV cache groups"),
    ({"window": 4096}, "it has windows"),
]


def reason(**changed: Any) -> str | None:
    """As much of vLLM's configuration as is read."""
    plain = {
        "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1, "data_parallel_size": 1, "use_ubatching": False,
        "lora_config": None, "speculative_config": None, "is_multimodal_model": False,
        "enable_prompt_embeds": False, "num_groups": 1, "window": None, "offload_group_size": 0,
        "cpu_offload_gb": 0.0,
    }  # fmt: skip
    facts = SimpleNamespace(**plain | changed)
    facts.parallel_config = facts.model_config = facts
    facts.offload_config = facts.uva = facts.prefetch = facts
    facts.get_sliding_window = lambda: facts.window
    config: Any = facts
    return why_no_passes(config, facts.num_groups)


def test_a_plain_engine_makes_passes() -> None:
    assert reason() is None


@pytest.mark.parametrize(("changed", "expected"), REFUSED)
def test_others_say_why_not(changed: dict[str, Any], expected: str) -> None:
    assert reason(**changed) == expected
