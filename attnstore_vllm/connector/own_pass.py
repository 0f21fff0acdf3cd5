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
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of a prompt that stand in a row, and are to be computed."""

    start: int
    """Position of the first."""
    token_ids: Sequence[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)


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


def make_groups(
    config: VllmConfig,
    specs: Sequence[tuple[AttentionSpec, Sequence[str]]],
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    backend_of: Mapping[str, Any],
) -> list[PassGroup]:
    """Args:
    specs: of each KV cache group, with its layers.
    kv_caches: vLLM's KV tensors, by layer.
    backend_of: the attention backend of each layer.
    """
    groups = []
    for of_vllm, layers in specs:
        first = kv_caches[layers[0]]
        parts = max(first.shape[:2]) // num_blocks
        spec = replace(of_vllm, block_size=of_vllm.block_size // parts)
        builder = backend_of[layers[0]].get_builder_cls()(spec, list(layers), config, first.device)
        groups.append(PassGroup(spec, tuple(layers), parts, builder))
    return groups


class OwnPass:
    """See the module. One pass at a time, on the thread that runs vLLM's steps, between or behind
    the hooks of one.

    Args:
        model: with an LM head that is not called.
        max_tokens, max_rows: of one pass at most; what vLLM has made its buffers for.
    """

    def __init__(
        self,
        config: VllmConfig,
        groups: Sequence[PassGroup],
        model: nn.Module,
        device: torch.device,
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._config = config
        self._groups = groups
        self._model = model
        self._device = device
        self._max_tokens, self._max_rows = max_tokens, max_rows

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
            for rows in slices(runs, self._max_tokens, self._max_rows):
                self._forward(rows, block_ids)

    def _forward(self, rows: Sequence[TokenRun], block_ids: Sequence[Sequence[int]]) -> None:
        # Backends that tell decodes from prefills want rows of one token first; the order is free.
        rows = sorted(rows, key=lambda row: (len(row) > 1, row.start))
        num_tokens = sum(map(len, rows))
        # int32, as vLLM's own are: compiled code has no guards, and would misread others.
        token_ids = self._tensor(list(chain.from_iterable(row.token_ids for row in rows)))
        positions = torch.cat([torch.arange(row.start, row.stop) for row in rows])
        positions = positions.to(self._device)
        starts = torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
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
                max_query_len=max(map(len, rows)),
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

    def _table(self, group: PassGroup, blocks: Sequence[int]) -> torch.Tensor:
        table = self._tensor(blocks)
        if group.parts == 1:
            return table
        parts = torch.arange(group.parts, dtype=torch.int32, device=self._device)
        return (table[:, None] * group.parts + parts).flatten()

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self._device)


def slices(runs: Sequence[TokenRun], max_tokens: int, max_rows: int) -> Iterator[list[TokenRun]]:
    """Passes that compute these tokens: none has more tokens or rows, and each token is in a pass
    that is no later than those of the tokens behind it."""
    rows: list[TokenRun] = []
    left = max_tokens
    for run in runs:
        at = 0
        while at < len(run):
            if not left or len(rows) == max_rows:
                yield rows
                rows, left = [], max_tokens
            part = run.token_ids[at : at + left]
            rows.append(TokenRun(run.start + at, part))
            at, left = at + len(part), left - len(part)
    if rows:
        yield rows
