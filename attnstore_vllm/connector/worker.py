# SPDX-License-Identifier: Apache-2.0
"""The worker side: copies what the plan says, and says what is copied. Decides nothing.

It is long since each of a worker's hooks has its method here.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.live_lora import LiveAdapters
from attnstore_vllm.identity.rank import GroupPages, KvFacts, KvPage, RankDescription
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.transfer.engine import CopyEngine, CpuEngine, LoadsOnly, Rotation
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout, block_of, describe, order_of_axes, page_of
from attnstore_vllm.transfer.page_tables import MapAhead
from attnstore_vllm.transfer.plan import LoadPlan, PassPlan, TransferPlan
from attnstore_vllm.transfer.pool import REFUSAL, SharedPool, has_room
from attnstore_vllm.transfer.worker_copies import Loads, Saves
from attnstore_vllm.types import Flow, Seen

if TYPE_CHECKING:
    from attnstore_vllm.connector.document_passes import DocumentPasses
    from attnstore_vllm.connector.nodes import NodeStore

logger = logging.getLogger(__name__)

KindOfLayer = tuple[int, torch.Tensor, LayerLayout]
"""A layer's number, its KV tensor and the layout of that."""
_OF_A_MODELS_CODE = (
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Worker:
    """One rank.

    Args:
        pool: this process's mapping; closed with the worker.
        write_buffer_bytes: HBM that saves may wait in on their way to DRAM, where copies run
            beside the model; given the device's memory in bytes.
        by_layer: the forward pass calls its hooks once a layer.
        is_alone: no other connector writes to blocks.
        rotations: says how the KV of each group is moved to other positions; given a block of the
            KV tensor of each group's first layer. Raises UnsupportedError with the reason why it
            cannot be.
        page: says where K and V are, given such a block of the one group; None: it is not asked
            for. Raises UnsupportedError.
        contents: says the same of each group, for an audit, given the KV tensors; None: it is not
            asked for.
        weights: looks at them, and says their name (LiveWeights.tell).
        own_files: see identity/weights.py.
        part: see KvFacts.
        passes: makes passes of our own, and writes KV of their tokens to a request's blocks; None:
            it is not asked for.
        node_ranks: ranks of this node; None: all.
        node_store: this node's NVMe, where the store's own is on another node.
    """

    def __init__(
        self,
        pool: SharedPool,
        rank: int,
        geometry: Geometry,
        num_blocks: int,
        *,
        write_buffer_bytes: Callable[[int], int],
        by_layer: bool = True,
        is_alone: bool = True,
        rotations: Callable[[Sequence[torch.Tensor]], list[Rotation]] | None = None,
        page: Callable[[torch.Tensor], KvPage] | None = None,
        contents: Callable[[Mapping[str, torch.Tensor]], tuple[GroupPages, ...]] | None = None,
        weights: Callable[[], tuple[Seen, bytes | None]] = lambda: (Seen.SAME, None),
        own_files: str | None = None,
        part: str = "",
        passes: DocumentPasses | None = None,
        node_ranks: int | None = None,
        node_store: NodeStore | None = None,
    ) -> None:
        self.node_ranks = node_ranks or geometry.num_ranks
        self._node_store = node_store
        self.passes, self._is_own_pass = passes, False
        self.description: dict[str, Any] = {REFUSAL: "it has registered no KV"}
        """As it was published."""
        self.look_at_weights = weights
        self._own_files = own_files
        self._part = part
        self._read_rotations = rotations
        self._page, self._contents = page, contents
        self._rotations: list[Rotation] = []
        self.pool = pool
        self.rank = rank
        self.geometry = geometry
        self._regions = geometry.layer_names
        """The region of each layer."""
        self._num_blocks = num_blocks
        self._write_buffer_bytes = write_buffer_bytes
        # A region of several layers is whole when the last of them is computed.
        self._by_layer = by_layer and len(self._regions) == geometry.num_layers
        self._is_alone = is_alone
        # vLLM copies states that change hands after the hook of begin_step().
        self._marks = all(group.reach != Reach.STATE.value for group in geometry.groups)
        self._engine: CopyEngine | None = None
        self._kv: dict[str, tuple[torch.Tensor, int]] = {}
        """vLLM's KV tensors, and the addresses that copies go by, by layer."""
        self._ahead: MapAhead | None = None
        self._stats = StepStats()
        self._plan = StepPlan()
        self._num_saves = 0
        """Saves that were planned and are not over."""
        self._is_saving = False
        """Whether this step has anything to do with saves. Most have not."""
        self._freed: set[str] = set()
        self._hooked: set[str] = set()
        """Layers for which this forward pass has called its hook."""
        self._has_hooks = False
        """A forward pass has called all: until then one may be that calls none."""
        self._whole = True
        self._waited_s = 0.0
        self._measured: list[tuple[int, float]] = []
        self.adapters = LiveAdapters()

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        kernel: str,
        layout: str = "",
        live: Callable[[Sequence[KindOfLayer]], Mapping[str, str]] | None = None,
        adapters: LiveAdapters | None = None,
    ) -> None:
        """Take the KV tensors, and tell the scheduler side what they look like.

        Args:
            kernel: names all else that decides the order of bytes within a page.
            layout: vLLM's name of the tensors' layout.
            live: says of the first layer of each kind what its bytes depend on and no setting
                tells.
            adapters: the model's LoRA adapters.
        """
        missing = self._regions.keys() - kv_caches.keys()
        if missing:
            raise UnsupportedError(f"vLLM registered no KV tensor for the layers {sorted(missing)}")
        tensors = [kv_caches[name] for name in self._regions]
        every = [
            describe(name, tensor, self._num_blocks)
            for name, tensor in zip(self._regions, tensors, strict=True)
        ]
        layouts, every = self._layouts_of(tensors, every)
        self.adapters = adapters or self.adapters
        first = tensors[0]
        kinds = _kinds(tensors, every)
        places = [at.base - layouts[0].base for at in every] if self.geometry.is_packed else []
        facts = live([(i, tensors[i], every[i]) for i in kinds]) if live is not None else {}
        self._rotations, why_not = self._find_rotations(kv_caches, layouts)
        page, why_no_page = self._find_page(kv_caches, layouts)
        engine = self._engine = self._make_engine(first.device, layouts)
        self.loads = Loads(engine, len(layouts))
        self._saves = Saves(engine, len(layouts), queue_blocks=engine.num_rows)
        self._kv = {name: (kv_caches[name], kv_caches[name].data_ptr()) for name in self._regions}
        axes, strides = order_of_axes(first)
        node = self._node_store
        described = RankDescription(
            KvFacts(
                device=_name_of(first.device),
                dtype=str(first.dtype),
                shape=tuple(first.shape[1:]),
                run_bytes=layouts[0].run_bytes,
                axes=axes,
                strides=strides,
                layout=layout,
                kernel=kernel,
                live=tuple(sorted(facts.items())),
                others=_digest(tensors, every, places) if len(kinds) > 1 or places else "",
                part=self._part,
                layers=_digest_names(self._regions) if self.geometry.stages else "",
            ),
            rows=engine.num_rows if engine.overlaps else None,
            # CudaEngine has those that the driver has page-locked.
            slots=getattr(engine, "num_slots", self.pool.num_slots),
            is_alone=self._is_alone,
            own_files=self._own_files,
            # CudaEngine has tried it.
            why_not_moved=why_not or getattr(engine, "why_not_moved", None),
            page=page,
            why_no_page=why_no_page,
            stages=self.geometry.stages,
            replicas=self.geometry.replicas,
            groups=self._contents(kv_caches) if self._contents is not None else (),
            node=None if node is None else node.told(),
        )
        self.description = described.to_json(has_room)
        self.pool.publish(self.rank, self.description)

    def _layouts_of(
        self, tensors: Sequence[torch.Tensor], every: Sequence[LayerLayout]
    ) -> tuple[list[LayerLayout], list[LayerLayout]]:
        """Where the pages of each region are, and those of each layer. Raises UnsupportedError."""
        pages, named = self.geometry.regions, zip(self._regions.items(), every, strict=True)
        if self.geometry.is_packed:
            of_blocks = {
                name: block_of(name, tensor, self._num_blocks, pages[0])
                for name, tensor in zip(self._regions, tensors, strict=True)
            }
            return self._layouts_of_regions(of_blocks), list(every)
        of_layers = {name: page_of(name, layout, pages[region]) for (name, region), layout in named}
        return self._layouts_of_regions(of_layers), list(of_layers.values())

    def _layouts_of_regions(self, of_layers: Mapping[str, LayerLayout]) -> list[LayerLayout]:
        """Where the pages of each region are. Groups lie over each other, so it is the same for all
        layers of a region. Raises UnsupportedError where it is not."""
        layouts: dict[int, LayerLayout] = {}
        for name, layout in of_layers.items():
            known = layouts.setdefault(self._regions[name], layout)
            if layout != known:
                raise UnsupportedError(
                    f"layer {name}: its pages lie at {layout}, those of another group's layer at "
                    f"{known}; groups that do not lie over each other are not known"
                )
        return [layouts[region] for region in range(self.geometry.num_layers)]

    def refuse(self, reason: str) -> None:
        """Tell the scheduler side that this rank cannot work with the store, and why."""
        self.description = {REFUSAL: reason}
        self.pool.refuse(self.rank, reason)

    def release_kv(self) -> None:
        """vLLM is about to take its KV out of the device's memory, between two steps: return when
        no copy that was begun reads or writes it. DRAM keeps what it has."""
        if self._engine is not None:
            self.loads.complete()
            self._saves.complete()

    def restore_kv(self) -> None:
        """vLLM's KV is in the device's memory again, with other content.

        Raises: UnsupportedError if it is somewhere else: copies go by its addresses.
        """
        for name, (kv, address) in self._kv.items():
            if kv.data_ptr() != address:
                raise UnsupportedError(
                    f"layer {name}: its KV was at {address:#x}, and since the server woke up it is "
                    f"at {kv.data_ptr():#x}; AttnStore copies by address. Start the server again"
                )

    def _find_rotations(
        self, kv_caches: Mapping[str, torch.Tensor], layouts: Sequence[LayerLayout]
    ) -> tuple[list[Rotation], str | None]:
        """How KV of each group is moved, or why it cannot be."""
        if self._read_rotations is None:
            return [], "truncation is off"
        groups = self.geometry.groups
        if any(group.reach == Reach.STATE.value for group in groups):
            return [], "it has recurrent states, which are of all tokens before them"
        if self.geometry.has_window_alone:
            return [], "all its layers have windows"
        if self.geometry.hit_tokens:
            return [], "its hits end at whole blocks alone"
        try:
            return self._read_rotations(self._first_blocks(kv_caches, layouts)), None
        except UnsupportedError as error:
            return [], str(error)
        except _OF_A_MODELS_CODE as error:  # a server that never moves KV must start
            return [], f"it could not be found out: {type(error).__name__}: {error}"

    def _find_page(
        self, kv_caches: Mapping[str, torch.Tensor], layouts: Sequence[LayerLayout]
    ) -> tuple[KvPage | None, str | None]:
        """Where K and V are, in all layers alike, or why that cannot be said."""
        if self._page is None:
            return None, None
        beside = len(self.geometry.groups) > 1 or self.geometry.is_packed
        if beside or self.geometry.has_window_alone:
            return None, "it has KV cache groups beside one of all tokens"
        try:
            return self._page(self._first_blocks(kv_caches, layouts)[0]), None
        except UnsupportedError as error:
            return None, str(error)
        except _OF_A_MODELS_CODE as error:
            return None, f"it could not be found out: {type(error).__name__}: {error}"

    def _first_blocks(
        self, kv_caches: Mapping[str, torch.Tensor], layouts: Sequence[LayerLayout]
    ) -> list[torch.Tensor]:
        """A block of each group's first layer, which stands for all. Raises UnsupportedError."""
        tensors = [[kv_caches[name] for name in group.layers] for group in self.geometry.groups]
        num_kinds = max(len(set(map(_facts_of, of_group, layouts))) for of_group in tensors)
        if num_kinds > 1:
            raise UnsupportedError(
                f"its layers keep KV of {num_kinds} kinds, and K of one kind can be turned"
            )
        # The kernels' blocks may be smaller.
        blocks = [of_group[0][: len(of_group[0]) // self._num_blocks] for of_group in tensors]
        self._check_pages(blocks)
        return blocks

    def _check_pages(self, blocks: Sequence[torch.Tensor]) -> None:
        """That K and V of a block fill its page. Raises UnsupportedError."""
        for group, block in zip(self.geometry.groups, blocks, strict=True):
            num_bytes = block.numel() * block.element_size()
            if num_bytes != self.geometry.page_bytes:
                raise UnsupportedError(
                    f"blocks of {group.block_tokens} tokens have {num_bytes} bytes in pages of "
                    f"{self.geometry.page_bytes}, and only whole pages can be moved"
                )

    def place(self) -> tuple[int, int, int, Geometry]:
        """The slots, as a CopyEngine of this rank takes them: address, slots, rank and shapes."""
        pool, here = self.pool, self.geometry.of_a_node(self.node_ranks)
        if pool.num_parts == 1:
            return pool.address, pool.num_slots, self.rank % self.node_ranks, here
        return pool.address, pool.num_slots, 0, self.geometry.of_a_part()

    def _make_engine(self, device: torch.device, layouts: list[LayerLayout]) -> CopyEngine:
        saves = self.geometry.saves(self.rank)
        if device.type == "cuda":
            from attnstore_vllm.transfer.cuda_engine import CudaEngine  # noqa: PLC0415

            device_bytes = torch.cuda.get_device_properties(device).total_memory
            num_rows = self._write_buffer_bytes(device_bytes) // sum(self.geometry.cells)
            engine: CopyEngine = CudaEngine(
                *self.place(),
                layouts,
                device,
                num_rows=num_rows if saves else 0,
                rotations=self._rotations,
                borders=self.pool.borders(),
            )
            return engine if saves else LoadsOnly(engine, num_rows)
        if device.type != "cpu":
            raise UnsupportedError(f"AttnStore does not know the device {device}")
        engine = CpuEngine(*self.place(), layouts, self._rotations)
        self._ahead = MapAhead(self.pool.buffer)  # CUDA's engine maps all by page-locking it
        return engine if saves else LoadsOnly(engine, 0)

    # ---- a step ------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass, and before anything is written to blocks that changed hands."""
        self._plan = plan
        if plan.looks_at_weights:
            self.adapters.look()
        if self._node_store is not None and plan.orders:
            self._node_store.disk.begin(plan.orders)
        self._hooked.clear()
        self._whole = plan.may_replay or not self._has_hooks
        self.loads.begin_step(plan.ended_loads, whole=self._whole)
        self._num_saves += len(plan.saves_before) + len(plan.saves)
        self._is_saving = self._num_saves > 0 or bool(plan.finished_saving)
        if self._is_saving:
            self._saves.begin_step(
                plan.saves_before,
                plan.saves,
                plan.preempted,
                by_layer=self._by_layer and not self._whole,
            )
        # Behind saves_before: they read blocks that loads of this step fill.
        if self._marks and any(load.layers_before for load in plan.loads):
            self.loads.mark()

    def start_load(self) -> None:
        for passing in self._plan.passes:
            self._compute(passing)
        if self._plan.loads:
            if self.passes is not None:
                self.passes.forget(p.request_id for p in self._plan.loads if not p.has_more)
            self.loads.begin(self._plan.loads, whole=self._whole)
            self._count(Flow.LOAD, self._plan.loads)

    def _compute(self, passing: PassPlan) -> None:
        """Make a pass between a request's documents. Where it fails the request is computed; but of
        several ranks the others wait in it, and would take this one's next step for its part."""
        assert self.passes is not None
        is_alone = self.geometry.num_ranks == 1
        if is_alone and self.loads.has_failed(passing.request_id):
            return  # what its other passes would say of its tokens is not whole
        self._is_own_pass = True
        try:
            self.passes.compute(passing)
        except _OF_A_MODELS_CODE as error:
            # What is not implemented is so on all ranks, before any of them waits for others.
            if not (is_alone or isinstance(error, NotImplementedError)):
                raise
            logger.error(
                "request %s is computed: a pass between its documents failed: %s: %s",
                passing.request_id,
                type(error).__name__,
                error,
            )
            self.loads.fail(passing.request_id)
        finally:
            self._is_own_pass = False

    def wait_for_layer(self, layer: str) -> None:
        index = self._regions.get(layer)
        if index is not None:
            self._hooked.add(layer)
            self.loads.wait_layer(index)
        if self.passes is not None and self._is_own_pass:
            self.passes.layer_reached(layer)

    def layer_computed(self, layer: str) -> None:
        if self.passes is not None and self._is_own_pass:
            self.passes.layer_computed(layer)
            return
        index = self._regions.get(layer)
        if index is not None and self._is_saving:
            self._saves.layer_computed(index)

    def end_step(self) -> None:
        """After the forward pass."""
        self._has_hooks = self._has_hooks or len(self._hooked) == len(self._regions)
        self.loads.end_step()
        if self._is_saving:
            self._saves.end_step(self._plan.finished_saving)
        # Here and not before the forward pass, which would wait for it.
        if self._plan.saves_before or self._plan.saves:
            self._count(Flow.SAVE, [*self._plan.saves_before, *self._plan.saves])
        # Here, since vLLM asks for the figures before it asks for the report.
        self._waited_s, self._measured = self.loads.take_times()
        if self._waited_s:
            self._stats.observe("load_wait_seconds", self._waited_s)
        if self._measured:
            self._stats.observe("load_seconds", sum(seconds for _, seconds in self._measured))

    def take_finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose kept blocks are free, that are received, and whose load has failed."""
        # Also in steps without saves: drafts have reports taken before end_step().
        self._freed = self._saves.take_freed()
        return self._freed, *self.loads.take_received()

    def failed_blocks(self) -> set[int]:
        """Blocks with KV of an adapter that was another one when the step began; and those that
        the loads of take_finished() have not filled."""
        checks, self._plan.checks = self._plan.checks, []
        missing = self.loads.take_missing()
        if not checks:
            return missing
        now = self.adapters.tell(check.lora_id for check in checks)
        failed: set[int] = set()
        for check in checks:
            wanted = check.digests[self.rank] if check.digests else None
            if wanted is None or now.get(check.lora_id) != wanted:
                failed.update(check.block_ids)
        return failed | missing

    def take_report(self) -> StepReport:
        """After take_finished()."""
        saved, given_up = self._saves.take_finished() if self._is_saving else ([], [])
        self._num_saves -= len(saved) + len(given_up)
        freed, self._freed = self._freed, set()
        adapters = self.adapters.tell(self._plan.adapters) if self._plan.adapters else {}
        return StepReport(
            self._plan.number,
            Counter([*self.loads.take_finished(), *saved, *given_up]),
            set(given_up),
            Counter(freed),
            self._waited_s,
            self._measured,
            {lora_id: {self.rank: told} for lora_id, told in adapters.items()},
            *self._look(),
            self._node_store.disk.take_results() if self._node_store is not None else (),
        )

    def _look(self) -> tuple[Seen, dict[int, bytes | None]]:
        if not self._plan.looks_at_weights:
            return Seen.NOTHING, {}
        seen, name = self.look_at_weights()
        return seen, {self.rank: name}

    def take_stats(self) -> StepStats:
        """Counts since the last call."""
        stats, self._stats = self._stats, StepStats()
        return stats

    def close(self) -> None:
        if self._engine is not None:
            self.loads.close()
            self._saves.close()
            self._engine.close()
            self._engine = None
            self._kv.clear()
        if self._ahead is not None:
            self._ahead.close()
        if self._node_store is not None:
            self._node_store.close()
            self._node_store = None
        self.pool.close()

    def _count(self, flow: Flow, plans: Sequence[TransferPlan]) -> None:
        num_blocks = sum(plan.num_blocks for plan in plans)
        num_bytes = num_blocks * self.geometry.block_bytes
        for plan in plans if flow is Flow.LOAD else ():
            assert isinstance(plan, LoadPlan)
            num_bytes += sum(
                run.num_tokens
                * self.geometry.block_bytes
                // self.geometry.groups[run.group].block_tokens
                for run in plan.moves
            )
        if num_bytes and (flow is Flow.LOAD or self.geometry.saves(self.rank)):
            self._stats.add("bytes", flow.value, num_bytes)


def _kinds(tensors: Sequence[torch.Tensor], layouts: Sequence[LayerLayout]) -> list[int]:
    """The first layer of each kind: of those whose tensors are alike."""
    seen: dict[Any, int] = {}
    for layer, facts in enumerate(map(_facts_of, tensors, layouts)):
        seen.setdefault(facts, layer)
    return list(seen.values())


def _facts_of(tensor: torch.Tensor, layout: LayerLayout) -> tuple[Any, ...]:
    """Facts that KvFacts has, of any layer's tensor."""
    shape, axes = tuple(tensor.shape[1:]), order_of_axes(tensor)
    return str(tensor.dtype), shape, layout.run_bytes, *axes


def _digest(
    tensors: Sequence[torch.Tensor], layouts: Sequence[LayerLayout], places: Sequence[int] = ()
) -> str:
    """Args: places: of the layers in a packed block, in bytes."""
    facts: list[Any] = list(map(_facts_of, tensors, layouts))
    return blake3(json.dumps([*facts, list(places)] if places else facts).encode()).hexdigest()


def _digest_names(layers: Mapping[str, int]) -> str:
    return blake3(json.dumps(list(layers.items())).encode()).hexdigest()


def _name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {major}.{minor}"
