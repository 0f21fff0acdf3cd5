# SPDX-License-Identifier: Apache-2.0
"""A worker whose model is a script, with our real worker side in it.

"KV" of a token is a digest of all tokens up to it, which is what causal KV depends on; so the
forward pass can tell of every byte it attends to whether it is the right one. It digests also the
pictures that stand there, and whatever else the request's KV may depend on (ScriptedWorker.base).
The worker keeps its own record of tokens, as a worker does, which is ahead of the scheduler's where
steps are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from attnstore_vllm.connector.envelopes import PlanEnvelope, ReportEnvelope
from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.scheduler.messages import StepPlan
from attnstore_vllm.transfer.engine import CopyEngine
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.pool import SharedPool

BLOCK = 16
TOKEN_KV = 16
"""Bytes of KV a token has in a layer."""
LAYERS = 3
"""Unless asked otherwise."""
REFUSED = 999_999
"""Sampled behind a load that has failed: no request may have it."""
VOCAB = 50
Kv = npt.NDArray[np.uint8]
MakeEngine = Callable[[tuple[int, int, int, Geometry], list[LayerLayout]], CopyEngine]
"""Of the pool, the rank, the slots' shape and the layers."""


@dataclass(frozen=True)
class Picture:
    """An input that takes the place of tokens: what is to be seen, and which tokens."""

    content: str
    offset: int
    length: int


def extend_kv(
    kv: list[bytes], tokens: list[int], base: bytes = b"", pictures: Sequence[Picture] = ()
) -> None:
    """Append the KV of the tokens that `kv` lacks: each digests the one before it."""
    for at in range(len(kv), len(tokens)):
        seen = "".join(
            f"{p.content} {at - p.offset}" for p in pictures if 0 <= at - p.offset < p.length
        )
        own = tokens[at].to_bytes(4, "little") + seen.encode()
        kv.append(blake3((kv[-1] if kv else base) + own).digest(length=TOKEN_KV))


def in_layer(kv: list[bytes], layer: int) -> Kv:
    """[tokens, TOKEN_KV]: what one layer has for it; those of rank 1 come after those of rank 0."""
    return np.frombuffer(b"".join(kv), np.uint8).reshape(-1, TOKEN_KV) ^ np.uint8(85 * layer % 256)


@dataclass
class Row:
    """A request as the worker knows it."""

    tokens: list[int]
    tables: list[list[int]]
    """Its blocks in each KV cache group."""
    kv: list[bytes] = field(default_factory=list)
    base: bytes = b""
    pictures: Sequence[Picture] = ()
    name: str = ""
    is_deluded: bool = False
    """See ScriptedWorker.deluded."""
    refused_from: int | None = None
    """From this token on its KV is not right, and vLLM has been told: until it computes it."""

    @property
    def block_ids(self) -> list[int]:
        """Of the first group."""
        return self.tables[0]

    def extend(self) -> None:
        extend_kv(self.kv, self.tokens, self.base, self.pictures)


@dataclass
class _Run:
    """What one request computes in a step: [start, stop), of which it wrote `written`."""

    row: Row
    start: int
    kv: list[bytes]
    written: list[bytes]


class _Worker(Worker):
    make: MakeEngine | None = None

    def _make_engine(self, device: torch.device, layouts: list[LayerLayout]) -> CopyEngine:
        if self.make is None:
            return super()._make_engine(device, layouts)
        return self.make(self.place(), layouts)


class ScriptedWorker:
    """Executes steps as vLLM's runner does: the same hooks in the same order.

    Args:
        make_engine: of copies; None: the one that the worker chooses.
        rank: its KV differs from that of others; with the same seed it samples the same tokens.
        first_layer: its number among those of all ranks.
        node: more arguments of Worker.
    """

    def __init__(
        self,
        pool: SharedPool,
        geometry: Geometry,
        num_blocks: int,
        seed: int,
        make_engine: MakeEngine | None = None,
        rank: int = 0,
        first_layer: int = 0,
        node: Mapping[str, Any] | None = None,
    ) -> None:
        self.names = list(geometry.layer_names)
        self.rank = rank
        kv_caches = self._allocate(geometry, num_blocks)
        self.loaded_tokens = 0
        self.encoded: dict[str, str] = {}
        """What the encoder has of a picture, by the name that vLLM has for it."""
        self.loads_ahead = 0
        self.rejected_tokens = 0
        self.sequences: list[list[int]] = []
        """The true tokens of every request that ever ran."""
        self.rows: list[Row] = []
        """What else they were, in the same order."""
        self.towers: Callable[[NewRequestData], str] = lambda _: ""
        """What the encoder works with for a request, but the model."""
        self.base: Callable[[NewRequestData], bytes] = lambda _: b""
        """What the KV of a request depends on, but tokens and pictures."""
        self.deluded: Callable[[str], bool] = lambda _: False
        """Requests that vLLM itself may serve with wrong KV. They are not checked, and what they
        compute continues what is in HBM, right or wrong: as a model's KV does."""
        self.between: Callable[[], object] = lambda: None
        """Called wherever a copy beside the model may go on."""
        self.at_end: Callable[[], object] = lambda: None
        """Called after the forward pass, before the step's end."""
        self.prepares_first = False
        """vLLM prepares blocks before it calls any hook: Model Runner V2 does."""
        self.reports_first = False
        """The step's end comes after its report, as where a draft model runs in between."""
        self._refused: set[int] = set()
        self._rows: dict[str, Row] = {}
        self._news: dict[str, NewRequestData] = {}
        self._random = Random(seed)
        self.first_layer = first_layer
        part = self._part(rank)
        self.side = _Worker(
            pool, rank, geometry, num_blocks, write_buffer_bytes=lambda _: 0, part=part,
            **(node or {}),
        )  # fmt: skip
        self.side.make = make_engine
        self.side.register_kv_caches(kv_caches, kernel="scripted")

    block = BLOCK
    """Tokens of a block, as the scheduler counts them."""

    def _allocate(self, geometry: Geometry, num_blocks: int) -> dict[str, torch.Tensor]:
        """HBM: the KV tensor of each layer."""
        tensors = [
            torch.zeros((num_blocks, BLOCK, TOKEN_KV), dtype=torch.uint8)
            for _ in range(geometry.num_layers)
        ]
        self.hbm: list[Any] = [tensor.numpy() for tensor in tensors]
        return {name: tensors[region] for name, region in geometry.layer_names.items()}

    def _part(self, rank: int) -> str:
        """Which of them this rank has; "": all."""
        return ""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        envelope = output.kv_connector_metadata
        assert isinstance(envelope, PlanEnvelope)
        plan = envelope.plan
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        starts = self._note(output)
        if self.prepares_first:
            self._prepare(output, starts)
        self.between()
        self.side.begin_step(plan)
        self.between()
        if not self.prepares_first:
            self._prepare(output, starts)
        if output.has_sync_kv_loads:
            self._load(plan)
        sampled = self._forward(output, starts, replays=plan.may_replay)
        if not output.has_sync_kv_loads:
            self._load(plan)
        self.between()
        self.at_end()
        if self.reports_first:
            report = self._report()
            self.between()
        self.side.end_step()
        if not self.reports_first:
            self.between()
            report = self._report()
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=report,
        )

    def _report(self) -> KVConnectorOutput:
        freed, received, failed = self.side.take_finished()
        missing, report = self.side.failed_blocks(), self.side.take_report()
        return KVConnectorOutput(
            finished_sending=freed, finished_recving=received | failed, failed_recving=failed,
            invalid_block_ids=self._refused | missing,
            kv_connector_worker_meta=None if report is None else ReportEnvelope(report),
        )  # fmt: skip

    def change_base(self) -> None:
        """What `base` says has changed. All that runs has lost its blocks, and begins anew."""
        for request_id, row in self._rows.items():
            kept = Row(list(row.tokens), [], [], row.base, row.pictures, row.name, row.is_deluded)
            self.rows[self._index(row)] = kept
            row.kv.clear()
            row.base = self.base(self._news[request_id])
            self.rows.append(row)
            self.sequences.append(row.tokens)

    def _index(self, row: Row) -> int:
        return next(i for i, other in enumerate(self.rows) if other is row)

    def close(self) -> None:
        self.side.close()

    def draft(self) -> int:
        return self._random.randrange(VOCAB)

    def _load(self, plan: StepPlan) -> None:
        self.loaded_tokens += sum(self.block * load.num_blocks for load in plan.loads)
        self.loads_ahead += sum(load.layers_before > 0 for load in plan.loads)
        self.side.start_load()
        self.between()

    def _prepare(self, output: SchedulerOutput, starts: dict[str, int]) -> None:
        """Whatever the runner does to blocks before it begins loads: nothing here."""

    def _note(self, output: SchedulerOutput) -> dict[str, int]:
        """Take note of the requests of a step. Returns how many tokens of each have KV."""
        starts: dict[str, int] = {}
        for name in output.free_encoder_mm_hashes:
            self.encoded.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            # Also of a streaming session that goes on: the next input replaces what was known.
            pictures = [self._picture(feature, self.towers(new)) for feature in new.mm_features]
            tables = [list(block_ids) for block_ids in new.block_ids]
            row = Row(
                list(new.prompt_token_ids),
                tables,
                [],
                self.base(new),
                pictures,
                new.req_id,
                self.deluded(new.req_id),
            )
            self._news[new.req_id] = new
            self._rows[new.req_id] = row
            self.sequences.append(row.tokens)
            self.rows.append(row)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            row = self._rows[request_id]
            new_blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                row.tables = [list(block_ids) for block_ids in new_blocks]
                # A reset drops tokens that were in flight.
                row.tokens[:] = cached.all_token_ids[request_id]
                row.kv.clear()
            elif new_blocks is not None:
                for table, added in zip(row.tables, new_blocks, strict=True):
                    table.extend(added)
            starts[request_id] = cached.num_computed_tokens[i]
            if row.refused_from is not None and starts[request_id] <= row.refused_from:
                self._align(row, request_id, cached.num_output_tokens[i])
        return starts

    def _picture(self, feature: MultiModalFeatureSpec, tower: str) -> Picture:
        """As the model sees it: vLLM's encoder runs once for all inputs of one name."""
        at = feature.mm_position
        made = f"{feature.mm_hash or feature.identifier}{tower}"
        content = self.encoded.setdefault(feature.identifier, made)
        return Picture(content, at.offset, at.length)

    def _forward(
        self, output: SchedulerOutput, starts: dict[str, int], *, replays: bool
    ) -> dict[str, list[int]]:
        self._refused = self.side.failed_blocks()
        sampled: dict[str, list[int]] = {}
        runs: list[_Run] = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            row, start = self._rows[request_id], starts[request_id]
            if self._refused.intersection(row.block_ids):
                refused = [block in self._refused for block in row.block_ids]
                row.refused_from = refused.index(True) * self.block
            if drafts:  # the scheduler counted drafts that were rejected since
                start = len(row.tokens) - 1
            run, sampled[request_id] = self._run(row, start, num_scheduled - len(drafts), drafts)
            runs.append(run)
        for layer in range(len(self.names)) if runs else ():
            self._compute(layer, runs, replays=replays)
        return sampled

    def _run(
        self, row: Row, start: int, num_tokens: int, drafts: list[int]
    ) -> tuple[_Run, list[int]]:
        """What is written for `num_tokens` and the drafts; and what was accepted, and one more.

        A draft of -1 is one that the worker made itself, as with steps in flight.
        """
        stop = start + num_tokens
        assert stop <= len(row.tokens), "the scheduler runs a token that was not sampled yet"
        if row.is_deluded and start:
            self._believe(row, start)
        row.extend()
        run = _Run(row, start, row.kv[:start], row.kv[start:stop])
        if stop < len(row.tokens):
            return run, []
        accepted = self._random.randrange(len(drafts) + 1)
        new = [d if d >= 0 else self._random.randrange(VOCAB) for d in drafts[:accepted]]
        new.append(self._random.randrange(VOCAB) if row.refused_from is None else REFUSED)
        row.tokens += new
        row.extend()
        run.written += row.kv[stop : stop + accepted]
        run.written += [b"rejected".ljust(TOKEN_KV)] * (len(drafts) - accepted)
        self.rejected_tokens += len(drafts) - accepted
        return run, new

    def _align(self, row: Row, request_id: str, num_output_tokens: int) -> None:
        """vLLM has dropped what was sampled behind a load that failed; its runner does so too."""
        prompt = self._news[request_id].prompt_token_ids
        assert prompt is not None
        del row.tokens[len(prompt) + num_output_tokens :]
        del row.kv[len(row.tokens) :]
        row.refused_from = None

    def _believe(self, row: Row, start: int) -> None:
        """Continue from what is in HBM, whatever it is."""
        found = self.hbm[0][np.array(row.block_ids)].reshape(-1, TOKEN_KV)[:start]
        in_hbm = found ^ in_layer([bytes(TOKEN_KV)], self.first_layer)
        row.kv[:] = [kv.tobytes() for kv in in_hbm]

    def _compute(self, layer: int, runs: list[_Run], *, replays: bool) -> None:
        """One layer, as with kernels that do not write their own KV: the new tokens' comes before
        the hook that waits. A graph that replays calls no hooks."""
        self.between()
        hbm, named = self.hbm[layer], self.first_layer + layer
        for run in runs:
            for at, kv in enumerate(in_layer(run.written, named), start=run.start):
                hbm[run.row.block_ids[at // BLOCK], at % BLOCK] = kv
        self.between()
        if not replays:
            self.side.wait_for_layer(self.names[layer])
        for run in runs:
            found = hbm[np.array(run.row.block_ids)].reshape(-1, TOKEN_KV)
            wanted = in_layer(run.kv + run.written, named)
            wrong = (found[: len(wanted)] != wanted).any(axis=1)
            is_known = run.row.is_deluded or run.row.refused_from is not None
            assert is_known or not wrong.any(), (
                f"wrong KV at position {int(wrong.argmax())} of {run.start} computed tokens, "
                f"layer {layer}"
            )
        self.between()
        if not replays:
            self.side.layer_computed(self.names[layer])
