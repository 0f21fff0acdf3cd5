# SPDX-License-Identifier: Apache-2.0
"""From vLLM's configuration to the two sides of the connector.

It is long since all parts of the store are opened here, for both sides.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.values import format_size
from attnstore_vllm.connector.audit_facts import check_not_stopped
from attnstore_vllm.connector.context_parallel import (
    num_ranks_of,
    over_ranks,
    part_of,
    why_not_turned,
)
from attnstore_vllm.connector.document_passes import DocumentPasses
from attnstore_vllm.connector.facts import facts_of
from attnstore_vllm.connector.groups import (
    check_chunks,
    groups_of,
    hit_tokens_of,
    is_bfloat16,
    needs_of,
    packed_bytes,
    prompts_only,
    regions_of,
)
from attnstore_vllm.connector.kv_events import KvEvents, teller_of
from attnstore_vllm.connector.media_data import (
    counts_media,
    encodes_by_adapter,
    read_media,
    why_no_media,
)
from attnstore_vllm.connector.model_rotation import page_of_kv, rotations_of
from attnstore_vllm.connector.nodes import (
    NodeStore,
    OtherNodes,
    fewer_replicas,
    nodes_of_an_engine,
    ranks_of_a_node,
)
from attnstore_vllm.connector.own_pass import make_own_pass
from attnstore_vllm.connector.page_contents import pages_of_groups
from attnstore_vllm.connector.pipeline import (
    PipelineStage,
    num_stages,
    rank_in_engine,
    tell_all,
    with_all,
)
from attnstore_vllm.connector.support import page_bytes_of, replicas_of, warn_of_order
from attnstore_vllm.connector.watchers import watchers_of
from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.errors import ConfigError, UnsupportedError
from attnstore_vllm.identity.drafts import drafts_of
from attnstore_vllm.identity.live_model import LiveWeights, models_of
from attnstore_vllm.identity.namespace import fingerprint
from attnstore_vllm.identity.rank import RankDescription
from attnstore_vllm.identity.weight_files import Digest
from attnstore_vllm.identity.weights import DigestOfNodes, Weights, identify, own_files
from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.io.codec import CODECS, NONE, Codec, PayloadShape, Quantized
from attnstore_vllm.io.device import Device
from attnstore_vllm.io.disk_node import warn_if_far
from attnstore_vllm.parent_watch import end_with_parent, parent_pid
from attnstore_vllm.policy.cost import default_write_buffer_bytes
from attnstore_vllm.preflight import (
    SLAB_NAME,
    lock_directory,
    machine_errors,
    remove_file_of_other_part,
)
from attnstore_vllm.scheduler.documents import settled
from attnstore_vllm.scheduler.media import MediaNames
from attnstore_vllm.scheduler.observed import ObservedScheduler
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.scheduler.start_log import start_lines
from attnstore_vllm.store.limited_residency import tenants_of
from attnstore_vllm.store.lookup import strategy_for
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.nvme.format import LABEL_BYTES, Encoding, SegmentHeader, pages
from attnstore_vllm.tiers.nvme.node_disk import FILE_NAME as NODE_NAME
from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
from attnstore_vllm.tiers.nvme.slab import Slab, open_slab
from attnstore_vllm.tiers.nvme.spread_io import SpreadIo
from attnstore_vllm.tiers.peers.make_peers import peers_of
from attnstore_vllm.tiers.shared.start import check_client, make_shared
from attnstore_vllm.tiers.tier_io import MakeTier
from attnstore_vllm.transfer.board import Board
from attnstore_vllm.transfer.geometry import Geometry, groups_text, round_chunk_tokens
from attnstore_vllm.transfer.pool import REFUSAL, SLOTS_AT, SharedPool, peek, pool_name
from attnstore_vllm.transfer.pool_files import parts_of
from attnstore_vllm.transfer.pool_memory import gpu_numa_node

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

DEVICE_DEPTH = 64
"""Transfers that the disk may have at a time: recovery reads headers with it; the store itself
keeps to io_depth."""


def _config(vllm_config: VllmConfig) -> StoreConfig:
    """The settings of this engine: its share of them under data parallelism."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    config = StoreConfig.parse(transfer.kv_connector_extra_config)
    # vLLM gives each data-parallel engine this suffix, and tells none of them how many there are.
    assert transfer.engine_id is not None
    if nodes_of_an_engine(vllm_config.parallel_config) > 1:  # see over_nodes() (plugin.py)
        config = replace(config, audit=None)
    is_parallel = re.search(r"_dp\d+$", transfer.engine_id) is not None
    rank = vllm_config.parallel_config.data_parallel_index
    return config.share(rank if is_parallel or config.data_parallel_size > 1 else None)


def geometry_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: StoreConfig,
    stages: Sequence[PipelineStage] = (),
) -> Geometry:
    """The shapes that both sides agree on, each from its own copy of the configuration.

    Args:
        stages: those of stages_of(). Without them the shapes have no room for other stages.
    """
    groups = over_ranks(groups_of(kv_cache_config), kv_cache_config, vllm_config)
    is_one = len(kv_cache_config.kv_cache_groups) == 1
    hit_tokens = hit_tokens_of(kv_cache_config)
    # Whole blocks, and hits may end where chunks do (index/prefix.py).
    multiple = math.lcm(hit_tokens or GRAIN_TOKENS, *(group.block_tokens for group in groups))
    chunk_tokens = round_chunk_tokens(config.chunk_tokens, multiple)
    check_chunks(groups[0], chunk_tokens)
    geometry = Geometry(
        num_ranks=num_ranks_of(vllm_config) * num_stages(vllm_config),
        regions=page_bytes_of(kv_cache_config) if is_one else regions_of(kv_cache_config, groups),
        groups=groups,
        chunk_tokens=chunk_tokens,
        replicas=replicas_of(vllm_config, kv_cache_config),
        is_packed=packed_bytes(kv_cache_config) > 0,
        hit_tokens=hit_tokens,
        prompts_only=prompts_only(kv_cache_config),
        is_encoded=_encodes(vllm_config, kv_cache_config, config),
    )
    geometry = fewer_replicas(vllm_config, geometry)
    return with_all(geometry, stages) if stages else geometry


def _encodes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> bool:
    """Whether DRAM keeps KV encoded. Raises ConfigError where copies cannot."""
    if config.dram_codec == NONE:
        return False
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"dram.codec is {config.dram_codec}, but KV is on a device of type {device}, whose "
            "copies encode nothing; expected cpu or cuda. Set codec: none"
        )
    return is_bfloat16(kv_cache_config)


def stages_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, reason: str | None
) -> Sequence[PipelineStage]:
    """The pipeline stages; () where there is one. For workers: see tell_all().

    Args:
        reason: why this stage cannot be served.
    """
    if num_stages(vllm_config) == 1:
        return ()
    if reason is not None:
        return tell_all(PipelineStage(reason))
    return tell_all(
        PipelineStage.of(geometry_of(vllm_config, kv_cache_config, _config(vllm_config)))
    )


def reason_of_chunks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """As support.py's reason_to_idle(), where the store's settings decide. Raises ConfigError."""
    try:
        geometry_of(vllm_config, kv_cache_config, _config(vllm_config))
    except UnsupportedError as error:
        return str(error)
    return None


def _open_pool(
    vllm_config: VllmConfig,
    config: StoreConfig,
    geometry: Geometry,
    member: int,
    near: Sequence[int] = (),
) -> SharedPool:
    num_slots = (config.dram_bytes - SLOTS_AT) // geometry.slot_bytes
    if num_slots < 2:
        raise ConfigError(
            f"dram is {format_size(config.dram_bytes)}, but one chunk of {geometry.chunk_tokens} "
            f"tokens takes {format_size(geometry.slot_bytes)}; ask for more, or lower chunk_tokens"
        )
    num_parts, why_one = parts_of(geometry, num_slots)
    if why_one and member == geometry.num_ranks:
        logger.warning("each rank maps and page-locks the parts of all ranks: %s", why_one)
    return SharedPool(
        _pool_name(vllm_config, config),
        num_slots,
        geometry.slot_bytes,
        num_ranks=geometry.num_ranks,
        member=member,
        near=near,
        num_parts=num_parts,
    )


def _pool_name(vllm_config: VllmConfig, config: StoreConfig) -> str:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.engine_id is not None
    return pool_name(transfer.engine_id, config.nvme.path)


def gpu_nodes(rank: int, num_ranks: int) -> list[int]:
    """The NUMA node of each rank's GPU; empty where there are none or one is not known."""
    if not torch.cuda.is_available():
        return []
    first = torch.cuda.current_device() - rank  # vLLM gives ranks GPUs in their order
    if first < 0 or first + num_ranks > torch.cuda.device_count():
        return []
    nodes = []
    for device in range(first, first + num_ranks):
        p = torch.cuda.get_device_properties(device)
        node = gpu_numa_node(f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0")
        if node is None:
            return []
        nodes.append(node)
    return nodes


def build_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, stages: Sequence[PipelineStage] = ()
) -> Worker:
    """The worker side of this process's rank. Raises ConfigError, UnsupportedError.

    Args:
        stages: see geometry_of().
    """
    end_with_parent()
    config = _config(vllm_config)
    geometry = geometry_of(vllm_config, kv_cache_config, config, stages)
    rank = rank_in_engine(vllm_config)
    here = geometry.of_a_node(ranks_of_a_node(vllm_config, geometry.num_ranks))
    local_rank = rank % here.num_ranks
    nodes = gpu_nodes(local_rank, here.num_ranks)
    if local_rank == 0:
        warn_of_order(_outer())
        warn_if_far(config.nvme.path, nodes)
    token_bytes = geometry.rank_bytes // geometry.chunk_tokens
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens

    layers = attention_layers(vllm_config, geometry)
    has_drafts = drafts_of(vllm_config) is not None
    find = cache(partial(models_of, layers, 2 if has_drafts else 1))  # a search of the heap, once
    live = LiveWeights(find, own_files)

    def find_one() -> Any:
        if (why := why_not_turned(vllm_config)) is not None:
            raise UnsupportedError(why)
        if has_drafts:
            raise UnsupportedError("its drafts keep KV of their own")
        return find()[0]

    of_groups = [{name: layers[name] for name in group.layers} for group in geometry.groups]
    rotations = partial(rotations_of, find_one, of_groups, vllm_config.model_config.dtype)
    codec = CODECS.get(config.nvme.codec)
    page = partial(page_of_kv, of_groups[0]) if codec and not codec.is_exact else None
    contents = partial(pages_of_groups, layers, geometry, kv_cache_config)

    def write_buffer_bytes(device_bytes: int) -> int:
        if config.write_buffer_bytes is not None:
            return max(config.write_buffer_bytes, geometry.rank_bytes)
        return default_write_buffer_bytes(
            token_bytes, step_tokens, geometry.rank_bytes, device_bytes
        )

    pool = _open_pool(vllm_config, config, here, local_rank, nodes)
    node_store = None
    if local_rank == 0 < rank:
        whole = _open_pool(vllm_config, config, here, here.num_ranks)
        node_store = NodeStore(vllm_config, config, geometry, whole, live.own_files)
    return Worker(
        pool,
        rank,
        geometry,
        kv_cache_config.num_blocks,
        write_buffer_bytes=write_buffer_bytes,
        # Where a step is cut into micro-batches, each calls the hooks.
        by_layer=not vllm_config.parallel_config.use_ubatching,
        is_alone=_is_alone(),
        rotations=None if config.truncation is None else rotations,
        page=page,
        contents=contents if config.audit is not None else None,
        weights=live.tell,
        own_files=live.own_files,
        passes=_passes(config, vllm_config, kv_cache_config, layers, find_one),
        part=part_of(vllm_config),
        node_ranks=here.num_ranks,
        node_store=node_store,
    )


def _passes(
    config: StoreConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layers: Mapping[str, Any],
    find: Callable[[], Any],
) -> DocumentPasses | None:
    if config.truncation is None or not config.truncation.documents:
        return None
    return DocumentPasses(lambda: make_own_pass(vllm_config, kv_cache_config, layers, find()))


def attention_layers(vllm_config: VllmConfig, geometry: Geometry) -> dict[str, Any]:
    """The layers of this process's model that keep KV, by name: group by group, the spine's first,
    in the order of the regions."""
    layers: Any = vllm_config.compilation_config.static_forward_context
    return {name: layers[name] for name in geometry.layer_names}


def _outer() -> KVTransferConfig | None:
    """That of the whole server: MultiConnector's children cannot see it in their own settings."""
    config = get_current_vllm_config_or_none()
    return config.kv_transfer_config if config is not None else None


def _is_alone() -> bool:
    """Whether no MultiConnector has made us."""
    transfer = _outer()
    return transfer is not None and transfer.kv_connector != "MultiConnector"


def build_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Scheduler:
    """The scheduler side, with the store. Raises ConfigError, UnsupportedError."""
    config = _config(vllm_config)
    geometry = _with_stages_of_workers(
        vllm_config, config, geometry_of(vllm_config, kv_cache_config, config)
    )
    here = geometry.of_a_node(ranks_of_a_node(vllm_config, geometry.num_ranks))
    with ExitStack() as undo:  # a failed start leaves no lock to one that this process tries next
        lock = lock_directory(config.nvme.path, parent_pid())
        undo.callback(os.close, lock)
        pool = _open_pool(vllm_config, config, here, member=here.num_ranks)
        undo.callback(pool.close)
        scheduler = _scheduler(vllm_config, kv_cache_config, config, geometry, pool, lock)
        undo.pop_all()
    end_with_parent(scheduler.flush, str(config.nvme.path))
    return scheduler


def _scheduler(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: StoreConfig,
    geometry: Geometry,
    pool: SharedPool,
    lock: int,
) -> Scheduler:
    ranks = _ranks(pool, geometry.num_ranks)
    pool.keep(min(r.slots for r in ranks))
    look, own_digest = identify(vllm_config, [r.own_files for r in ranks], config.nvme.path)
    others = OtherNodes.of(ranks, vllm_config)
    digest: Digest | DigestOfNodes | bytes = own_digest
    spread: Callable[..., NvmeIo] | None = None
    if others.told:
        config, digests, count = others.with_least(config), others.digests(), len(others.told)
        look += others.names
        digest = DigestOfNodes(own_digest, digests, count)
        spread = partial(SpreadIo, others=count, digests=digests)
        logger.info("this engine is on %d nodes: each keeps its own ranks' KV", 1 + count)
    namespace = fingerprint(vllm_config, geometry, [r.kv for r in ranks], vllm.__version__, look)
    check_not_stopped(config.nvme.path, namespace)
    names = Weights(namespace, digest)
    teller = teller_of(vllm_config, geometry, lambda: names.namespace)
    if config.dram_codec != NONE and not geometry.is_encoded:
        logger.warning(
            "dram.codec: %s is not used, since not all KV of this model is bfloat16: it is kept as "
            "it is",
            config.dram_codec,
        )
    codec = _codec(config, geometry, ranks)
    if config.truncation is not None:
        config = replace(config, truncation=settled(config.truncation, geometry.most_layers))
    slab, device, disk = _open_slab(vllm_config, config, geometry, pool, namespace, codec)
    info = own_version(), vllm.__version__, disk, config.eviction
    engine = facts_of(vllm_config, kv_cache_config, geometry, ranks, config.audit, info)
    asks_remote = strategy_for(engine.needs).asks_remote and not others.told
    tiers = _remote_tiers(config, geometry, namespace, pool, asks=asks_remote)
    store = Store(
        pool,
        slab,
        device,
        config,
        engine,
        more_tiers=tiers,
        teller=teller,
        make_disk=spread or partial(NvmeIo, codec=codec),
    )
    watchers = watchers_of(vllm_config, config, geometry, own_version())
    make = partial(ObservedScheduler, watchers) if watchers else Scheduler
    media = MediaNames(
        read_media,
        counted=counts_media(vllm_config),
        why_not=why_no_media(vllm_config),
        by_adapter=encodes_by_adapter(vllm_config),
    )
    board = _board(vllm_config)
    scheduler = make(store, geometry, names, config, engine, lock=lock, media=media, board=board)
    if teller is not None:
        scheduler.events = KvEvents(store, teller)
    return scheduler


def _open_slab(
    vllm_config: VllmConfig,
    config: StoreConfig,
    geometry: Geometry,
    pool: SharedPool,
    namespace: bytes,
    codec: Codec | None,
) -> tuple[Slab, Device, str]:
    """The slab file of the settings' directory, its device, and what serves it."""
    shape = SegmentHeader(
        number=-1,
        chunk_tokens=geometry.chunk_tokens,
        payload_bytes=pool.slot_bytes,
        namespace=namespace,
        generation=b"",
        last_used=int(time.time()),
        label=_label(vllm_config, geometry),
        encoding=_encoding(vllm_config, codec, geometry),
    )
    region = (pool.address, pool.num_slots * pool.slot_bytes)
    with machine_errors(config.nvme.path):
        remove_file_of_other_part(config.nvme.path / NODE_NAME)
        slab = open_slab(config.nvme.path / SLAB_NAME, config.nvme.capacity_bytes, shape)
        device, kind = open_device(slab.path, DEVICE_DEPTH, config.nvme.io, [region])
    needs = needs_of(geometry)
    asks_remote = strategy_for(needs).asks_remote
    lines = start_lines(
        own_version(), config, geometry, pool.num_slots, slab, kind, asks_remote=asks_remote
    )
    logger.info("%s", "\n".join(lines))
    return slab, device, kind


def _remote_tiers(
    config: StoreConfig, geometry: Geometry, namespace: bytes, pool: SharedPool, *, asks: bool
) -> Sequence[MakeTier]:
    """The tiers that must be asked, nearest first: other engines of this host, and the one that
    several servers share. Raises ConfigError.

    Args:
        asks: see Strategy.asks_remote.
    """
    if not asks:
        if config.shared is not None:
            logger.warning(
                "shared: is not used, since some layers of this model keep no KV of all "
                "tokens: what lacks it of one group would shorten the hit of all"
            )
        return ()
    nvme, shared, size = config.nvme, config.shared, geometry.chunk_tokens
    peers = peers_of(nvme.path, nvme.group_path, config.siblings(), namespace, size, pool)
    if shared is None:
        return peers
    check_client(shared)
    made = make_shared(
        shared,
        size,
        namespace,
        nvme.path,
        slot_bytes=pool.slot_bytes,
        quotas=tenants_of(config.quotas),
    )
    return (*peers, made)


def own_version() -> str:
    try:
        return importlib.metadata.version("attnstore-vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _board(vllm_config: VllmConfig) -> Board | None:
    """The board for figures while the engine sleeps. Without it they come with the next step."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None and transfer.engine_id is not None
    try:
        return Board(transfer.engine_id)
    except OSError as error:
        logger.warning("figures stand still while the engine is idle: %s", error)
        return None


def _ranks(pool: SharedPool, num_ranks: int) -> list[RankDescription]:
    """The description that each has published. Raises UnsupportedError where one has not, or
    cannot."""
    for rank in range(num_ranks):
        if not pool.has_joined(rank) and pool.description(rank) is None:
            raise UnsupportedError(
                f"rank {rank} has not opened this machine's DRAM tier: it runs on another machine "
                "(as Ray may place it), and an engine on several is not served; or its log says why"
            )
    return [_rank(rank, pool.description(rank)) for rank in range(num_ranks)]


def _rank(rank: int, description: dict[str, Any] | None) -> RankDescription:
    if description is None:
        raise UnsupportedError(
            f"rank {rank} has not said what its KV looks like; its log says why, or this vLLM "
            "makes its connectors in an order that AttnStore does not know"
        )
    if REFUSAL in description:
        raise UnsupportedError(f"rank {rank} cannot: {description[REFUSAL]}")
    return RankDescription.of_json(description)


def _with_stages_of_workers(
    vllm_config: VllmConfig, config: StoreConfig, geometry: Geometry
) -> Geometry:
    """The scheduler side's shapes, with room for all pipeline stages. Raises UnsupportedError."""
    if num_stages(vllm_config) == 1:
        return geometry
    first = _rank(0, peek(_pool_name(vllm_config, config), 0))
    return replace(geometry, stages=first.stages, replicas=first.replicas)


def _codec(
    config: StoreConfig, geometry: Geometry, ranks: Sequence[RankDescription]
) -> Codec | None:
    """The codec of the settings. Raises ConfigError where it makes no sense of this model's KV."""
    codec = CODECS.get(config.nvme.codec)
    if not isinstance(codec, Quantized):
        return codec
    page, num_pages = ranks[0].page, len({rank.page for rank in ranks})
    why = next(filter(None, [rank.why_no_page for rank in ranks]), None)
    if why is None and (page is None or num_pages > 1):
        why = "its ranks differ in where K and V are"
    if page is not None and page.block_tokens != geometry.block_tokens:
        why = "a rank has some of each block's tokens (--decode-context-parallel-size)"
    if why is not None or page is None:
        raise ConfigError(
            f"nvme.codec is {codec.name}, which cannot keep this model's KV: {why}. "
            "Set lossless or none"
        )
    units = geometry.num_ranks // geometry.replicas * geometry.most_layers
    shape = PayloadShape(
        page.dtype,
        units,
        geometry.blocks_per_chunk,
        page.block_tokens,
        page.num_heads,
        page.head_dim,
        page.key,
        page.value,
    )
    made = codec.of(shape)
    if not made.room(geometry.slot_bytes, page.dtype):
        raise ConfigError(
            f"nvme.codec is {codec.name}, but chunks of this model are no pages of {page}. Set "
            "lossless or none"
        )
    return made


def _encoding(vllm_config: VllmConfig, codec: Codec | None, geometry: Geometry) -> Encoding | None:
    """The codec, with room for payloads of this model.

    States are often float32 in a bfloat16 model, and have places of the same size as KV.
    """
    if codec is None:
        return None
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if geometry.is_packed or any(group.reach == Reach.STATE.value for group in geometry.groups):
        dtype = "mixed"
    return Encoding(codec.name, codec.version, pages(codec.room(geometry.slot_bytes, dtype)))


def _label(vllm_config: VllmConfig, geometry: Geometry) -> str:
    """A name of this namespace for people."""
    name = str(vllm_config.model_config.served_model_name or vllm_config.model_config.model)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    label = f"{name} ({dtype}, {geometry.num_ranks} rank(s), vLLM {vllm.__version__})"
    groups = groups_text(geometry.groups)  # `attnstore inspect` reads them: they must not be cut
    return f"{label[: LABEL_BYTES - len(groups) - 1]} {groups}" if groups else label
