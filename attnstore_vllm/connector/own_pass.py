# SPDX-License-Identifier: Apache-2.0
"""Forward passes of our own over the model that vLLM has loaded: KV of tokens between documents.

vLLM takes KV up to one token and computes all behind it. Where documents lie in a prompt with gaps
between them, the gaps are computed here, in one pass:

    prompt     | gap 0 |  document A  | gap 1 |   document B   | gap 2 | ...
    rows         row 0                  row 1                    row 2

Each run of tokens is a row of the batch, whose sequence ends where the run does, with the blocks of
the one request. A layer writes the KV of all rows before any of them attends. So a later gap sees
the earlier ones of the same pass, as in CacheBlend (EuroSys'25), without a change of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.offload import OffloadConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from attnstore_vllm.transfer.plan import TokenRun


@dataclass(frozen=True, slots=True)
class PassGroup:
    """A KV cache group, as a pass writes it."""

    spec: AttentionSpec
    """With the block size of the kernels, which may be a part of vLLM's."""
    layers: tuple[str, ...]
    parts: int
    """Blocks of the kernels in one of vLLM's."""
    builder: AttentionMetadataBuilder[Any]
    """Our own: vLLM's has buffers that the running step uses."""
    writes_first: bool
    """Layers write their KV before they wait for what is loaded; else where they attend."""


def why_no_passes(config: VllmConfig, num_groups: int) -> str | None:
    """Why this engine makes no passes of its own; None: it may."""
    parallel, model = config.parallel_config, config.model_config
    facts = {
        "it has pipeline stages": parallel.pipeline_parallel_size > 1,
        "its ranks share out a prompt": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "data-parallel ranks compute experts together": parallel.data_parallel_size > 1,
        "its steps are cut into micro-batches": parallel.use_ubatching,
        "it has LoRA adapters": config.lora_config is not None,
        "it has drafts": config.speculative_config is not None,
        "its model takes pictures or sounds": model.is_multimodal_model,
        "its prompts may be embeddings": model.enable_prompt_embeds,
        # A pass that ends within the model, or fails there, leaves their buffers to other layers.
        "its weights are offloaded": _offloads(config.offload_config),
        "it has several KV cache groups": num_groups > 1,
        "it has windows": model.get_sliding_window() is not None,
    }
    return next((reason for reason, is_so in facts.items() if is_so), None)


def _offloads(config: OffloadConfig) -> bool:
    return config.uva.cpu_offload_gb > 0 or config.prefetch.offload_group_size > 0


def make_own_pass(
    config: VllmConfig, kv_cache_config: KVCacheConfig, layers: Mapping[str, Any], model: nn.Module
) -> OwnPass:
    """Args:
        layers: that keep KV, by name.

    Raises: NotImplementedError where layers of a group attend in other ways than its first.
    """
    kv_caches: dict[str, torch.Tensor] = {name: layer.kv_cache for name, layer in layers.items()}
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        names, of_vllm = list(group.layer_names), group.kv_cache_spec
        first = kv_caches[names[0]]
        kinds = {(layers[name].get_attn_backend(), layers[name].num_heads) for name in names}
        if len(kinds) > 1:
            raise NotImplementedError(f"layers of a KV cache group attend in {len(kinds)} ways")
        parts = max(first.shape[:2]) // kv_cache_config.num_blocks
        spec = replace(of_vllm, block_size=of_vllm.block_size // parts)
        backend = layers[names[0]].get_attn_backend()
        with set_current_vllm_config(config):  # some builders ask for it
            made = backend.get_builder_cls()(spec, names, config, first.device)
        writes_first = not backend.forward_includes_kv_cache_update
        groups.append(PassGroup(spec, tuple(names), parts, made, writes_first))
    limits = config.scheduler_config
    return OwnPass(
        config,
        groups,
        model,
        kv_caches,
        max_tokens=limits.max_num_batched_tokens,
        max_rows=limits.max_num_seqs,
    )


class OwnPass:
    """See the module. One pass at a time, on the thread that runs vLLM's steps, between or behind
    the hooks of one.

    Args:
        model: with an LM head that is not called.
        kv_caches: KV tensors by layer, in the order in which the model has them.
        max_tokens, max_rows: of one pass at most; what vLLM has made its buffers for.
    """

    def __init__(
        self,
        config: VllmConfig,
        groups: Sequence[PassGroup],
        model: nn.Module,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._config = config
        self._groups = groups
        self._model = model
        self._kv_caches = kv_caches
        self._device = next(iter(kv_caches.values())).device
        self.max_tokens, self.max_rows = max_tokens, max_rows

    def compute(self, runs: Sequence[TokenRun], block_ids: Sequence[Sequence[int]]) -> None:
        """Write the KV of these tokens to the blocks of their request.

        Args:
            runs: in the order of their positions. KV of all tokens between and before them is in
                the blocks, or comes before its layer is reached (wait_for_layer_load).
            block_ids: of the request, by KV cache group.
        Raises: what the model or a kernel raises; these tokens' KV is worth nothing then.
        Cost: a pass's weights once for each max_tokens, and the tokens' share of a prefill.
        """
        with torch.inference_mode():
            for rows in self.slices(runs):
                self._forward(rows, block_ids)

    def slices(self, runs: Sequence[TokenRun]) -> Iterator[list[TokenRun]]:
        """Runs of one pass each."""
        return slices(runs, self.max_tokens, self.max_rows)

    def compared_layer(self) -> str:
        """The second layer: K of the first is the same wherever a token stands."""
        return list(self._kv_caches)[1]

    def writes_first(self, layer: str) -> bool:
        """Whether the layer's KV is written when it waits for what is loaded."""
        return self._group_of(layer).writes_first

    def keys(self, positions: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
        """A copy of K of these tokens in the compared layer; of latent KV all of it.

        Returns: [tokens, heads, half of the content], or [tokens, content].
        """
        name = self.compared_layer()
        group = self._group_of(name)
        at = self._tensor(positions).to(torch.int64)
        size, kv = group.spec.block_size, self._kv_caches[name]
        found = self._table(group, blocks)[at // size].to(torch.int64)
        if kv.dim() == 3:
            return kv[found, at % size]
        return kv[found, :, at % size, : kv.shape[-1] // 2]

    def _forward(self, rows: Sequence[TokenRun], block_ids: Sequence[Sequence[int]]) -> None:
        # Backends that tell decodes from prefills want rows of one token first; the order is free.
        rows = sorted(rows, key=lambda row: (_length(row) > 1, row.start))
        num_tokens = sum(map(_length, rows))
        # int32, as vLLM's own are: compiled code has no guards, and would misread others.
        token_ids = self._tensor(list(chain.from_iterable(row.token_ids for row in rows)))
        positions = torch.cat([torch.arange(row.start, row.stop) for row in rows])
        positions = positions.to(self._device)
        starts = torch.tensor([0, *map(_length, rows)], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        stops = torch.tensor([row.stop for row in rows], dtype=torch.int32)
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for group, blocks in zip(self._groups, block_ids, strict=True):
            table = self._table(group, blocks)
            size = group.spec.block_size
            mapping = table[positions // size].to(torch.int64) * size + positions % size
            common = CommonAttentionMetadata(
                query_start_loc=starts.to(self._device),
                query_start_loc_cpu=starts,
                seq_lens=stops.to(self._device),
                seq_lens_cpu_upper_bound=stops,
                num_reqs=len(rows),
                num_actual_tokens=num_tokens,
                max_query_len=max(map(_length, rows)),
                max_seq_len=max(row.stop for row in rows),
                block_table_tensor=table.expand(len(rows), -1).contiguous(),
                slot_mapping=mapping,
                causal=True,
                is_prefilling=torch.ones(len(rows), dtype=torch.bool),
                positions=positions,
            )
            built = group.builder.build(0, common)
            metadata |= dict.fromkeys(group.layers, built)
            slots |= dict.fromkeys(group.layers, mapping)
        with set_forward_context(metadata, self._config, num_tokens=num_tokens, slot_mapping=slots):
            self._model(
                input_ids=token_ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    def _group_of(self, layer: str) -> PassGroup:
        return next(group for group in self._groups if layer in group.layers)

    def _table(self, group: PassGroup, blocks: Sequence[int]) -> torch.Tensor:
        table = self._tensor(blocks)
        if group.parts == 1:
            return table
        parts = torch.arange(group.parts, dtype=torch.int32, device=self._device)
        return (table[:, None] * group.parts + parts).flatten()

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self._device)


def _length(run: TokenRun) -> int:
    return len(run.token_ids)


def slices(runs: Sequence[TokenRun], max_tokens: int, max_rows: int) -> Iterator[list[TokenRun]]:
    """Passes that compute these tokens: none has more tokens or rows, and each token is in a pass
    that is no later than those of the tokens behind it."""
    rows: list[TokenRun] = []
    left = max_tokens
    for run in runs:
        at = 0
        while at < _length(run):
            if not left or len(rows) == max_rows:
                yield rows
                rows, left = [], max_tokens
            part = run.token_ids[at : at + left]
            rows.append(TokenRun(run.start + at, part))
            at, left = at + len(part), left - len(part)
    if rows:
        yield rows
