# SPDX-License-Identifier: Apache-2.0
"""Truncated prompts of models with several KV cache groups: KV in HBM by layer, and a reference of
the same semantics, computed by transformers.

The reference takes K and V of the kept tokens from a forward pass over the whole source, run at the
positions that they are moved to. That is what rotating K means, whatever the family's own rotation:
the hidden states are those of the source, since rotations are relative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnstore_vllm.connector.model_rotation import content_of
from tests.vllm.engine import Answer, Engine
from tests.vllm.family_checks import compute, forget
from tests.vllm.prompts import random_tokens

ASKS = {"kv_transfer_params": {"attnstore": {"truncation": True, "report": True}}}
LENGTH, NEW, ANSWER = 1_400, 40, 8
Kept = tuple[tuple[int, int], ...]
"""Parts of the source, from a token to a token, in the order in which they are kept."""
KvOfLayers = dict[str, tuple[bytes, bytes]]
"""K and V of each layer, [tokens, heads, dim] float32; NaN where vLLM has no block."""


@dataclass(frozen=True, slots=True)
class Served:
    """A truncated prompt, served with moved KV."""

    source: list[int]
    prompt: list[int]
    moved: int
    found: int
    answer: Answer
    computed: Answer
    """The same prompt's, with nothing moved."""
    stored: KvOfLayers
    """Of the source, when its first token was said."""
    kv: KvOfLayers


def read_layers(
    worker: Any, tables: Sequence[Sequence[int]], groups: Sequence[Sequence[str]], tokens: int
) -> KvOfLayers:
    """K and V of a request's first tokens, read through the probed layouts."""
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context
    found: KvOfLayers = {}
    for table, names in zip(tables, groups, strict=True):
        for name in names:
            kv = layers[name].kv_cache
            kv = kv[0] if isinstance(kv, list | tuple) else kv
            content = content_of(layers[name], kv[:1])
            _, heads, block_tokens, width = kv.shape
            sides = []
            for side in (content.key, content.value):
                places = torch.from_numpy(side.places(block_tokens, heads, width // 2))
                pages = [kv[block].contiguous().view(-1)[places].float() for block in table]
                for block, page in zip(table, pages, strict=True):
                    if not block:
                        page.fill_(torch.nan)
                sides.append(torch.cat(pages)[:tokens].contiguous().numpy().tobytes())
            found[name] = sides[0], sides[1]
    return found


def say(
    engine: Engine, prompt: Sequence[int], salt: str, max_tokens: int
) -> tuple[KvOfLayers, Answer]:
    """KV in HBM when the first token was said, and the answer."""
    number = engine.submit(prompt, salt=salt, max_tokens=max_tokens, extra_args=ASKS)
    engine.wait_for(lambda: engine.request(number).num_output_tokens > 0, engine.step)
    tables = engine.scheduler.kv_cache_manager.get_block_ids(engine.request(number).request_id)
    groups = [g.layer_names for g in engine.scheduler.kv_cache_config.kv_cache_groups]
    (kv,) = engine.llm.collective_rpc(read_layers, args=(tables, groups, len(prompt)))
    (answer,) = engine.finish(number)
    engine.drain()
    return kv, answer


def serve(engine: Engine, seed: str, kept: Kept, tier: str = "dram") -> Served:
    """A source is stored, and a prompt of its parts is served, with garbage in all of HBM."""
    source = random_tokens(seed, LENGTH)
    stored, _ = say(engine, source, seed, 2)
    if tier == "nvme":
        engine.evict_dram()
    forget(engine)
    moved = int(engine.metric("moved_tokens", "dram"))
    prompt = [token for start, stop in kept for token in source[start:stop]]
    prompt += random_tokens((seed, "new"), NEW)
    kv, answer = say(engine, prompt, seed, ANSWER)
    moved = int(engine.metric("moved_tokens", "dram")) - moved
    computed = compute(engine, prompt, 0, ANSWER)
    return Served(source, prompt, moved, answer.cached_tokens, answer, computed, stored, kv)


def source_positions(kept: Kept) -> torch.Tensor:
    """Where each kept token stood in the source."""
    return torch.cat([torch.arange(start, stop) for start, stop in kept])


def array(raw: bytes, heads: int, dim: int) -> torch.Tensor:
    """[tokens, heads, dim], float64."""
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1, heads, dim).double()


def reference_drifts(
    directory: Path, served: Served, kept: Kept, **config: Any
) -> tuple[float, float]:
    """The largest difference of a candidate's log-probability from the reference, in nats; and the
    same of the computed prompt, which says how much is rounding between the two programs.

    Args:
        config: of transformers' model, where vLLM reads the file otherwise.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **config
    ).eval()
    plain = replace(served, answer=served.computed, found=0)
    with torch.no_grad():
        return _drift(model, served, kept), _drift(model, plain, kept)


def _drift(model: Any, served: Served, kept: Kept) -> float:
    wanted = _reference(model, served, kept)
    return max(
        abs(logprob - float(wanted[i, token]))
        for i, candidates in enumerate(served.answer.logprobs)
        for token, logprob in candidates
    )


def _reference(model: Any, served: Served, kept: Kept) -> torch.Tensor:
    """The log-probabilities of each token of the answer, [tokens, vocabulary]."""
    from transformers import DynamicCache

    source = torch.tensor([served.source])
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    at = 0
    for start, stop in kept:
        cache, used = DynamicCache(), min(stop, start + served.found - at)
        if used <= start:
            break
        positions = torch.arange(len(served.source))[None] + (at - start)
        model(source, past_key_values=cache, position_ids=positions, use_cache=True)
        sides = [(layer.keys, layer.values) for layer in cache.layers]
        parts.append([(k[:, :, start:used], v[:, :, start:used]) for k, v in sides])
        at += used - start
    cache = DynamicCache()
    for number, layer in enumerate(zip(*parts, strict=True)):
        keys, values = (torch.cat(side, 2) for side in zip(*layer, strict=True))
        cache.update(keys, values, number)
    said = [*served.prompt[at:], *served.answer.tokens[:-1]]
    positions = torch.arange(at, at + len(said))[None]
    out = model(torch.tensor([said]), past_key_values=cache, position_ids=positions, use_cache=True)
    logits: torch.Tensor = out.logits[0, -len(served.answer.tokens) :]
    return logits.log_softmax(-1)
