# SPDX-License-Identifier: Apache-2.0
"""The connectors that are tried: how each is set up, and where it keeps what it stores."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from attnstore_vllm.cli.slab_file import RecordState, SlabFile, opened
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.tiers.nvme.format import SegmentHeader
from benchmarks.compare import lmcache
from benchmarks.server import free_port

MIB: Final = 1 << 20
DRAM_BYTES: Final = 64 * MIB
LMCACHE_BYTES: Final = 1 << 30
"""It counts in GB."""

Transfer = dict[str, Any]
"""A KVTransferConfig."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file that the system wrote, and reads, as one."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class System:
    """One way to keep KV.

    Args:
        transfer: of its directory and a port, what vLLM is started with.
        package: whose version counts.
        keeps: what it stores outlives the process, with these settings.
        pieces: of its directory, what it stored of whole chunks, in an order that is always the
            same. Pieces of one size may change places.
        daemon: a process beside the engine does the work.
    """

    name: str
    words: str
    transfer: Callable[[Path, int], Transfer]
    package: str = "vllm"
    keeps: bool = True
    pieces: Callable[[Path], list[Piece]] | None = None
    daemon: bool = False

    @property
    def version(self) -> str | None:
        try:
            return f"{self.package} {version(self.package)}"
        except PackageNotFoundError:
            return None

    def why_not(self) -> str | None:
        """Why it cannot run here, as far as is known before it is started."""
        if self.package == "lmcache" and find_spec("lmcache") is None:
            return "LMCache is not installed (docs/bench.md says how)"
        return None

    @contextmanager
    def running(self, directory: Path, log: Path) -> Iterator[Transfer]:
        """What vLLM is to be started with. A daemon of its own is there until the end."""
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            port = 0
            if self.daemon:
                port = free_port()
                undo.enter_context(lmcache.daemon(LMCACHE_BYTES, directory, port, log))
            yield self.transfer(directory, port)


def _connector(name: str, extra: Mapping[str, Any], **more: Any) -> Transfer:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra),
        **more,
    }


def _attnstore(directory: Path, _: int) -> Transfer:
    """`attnstore_vllm`'s YAML has no `kv_load_failure_policy`: it is recompute there."""
    nvme = {"path": str(directory), "capacity": "256MiB"}
    settings = {
        "dram": DRAM_BYTES, "nvme": nvme,
        # A tiny model computes sooner than it loads, and then no fault would reach the store.
        "compute_if_sooner": False, "load_deadline": "60s",
        "audit": "off",  # keys and checksums are seen, as of the others
    }  # fmt: skip
    return _connector("AttnStoreConnector", settings, kv_load_failure_policy="recompute")


def _example(directory: Path, _: int) -> Transfer:
    return _connector("ExampleConnector", {"shared_storage_path": str(directory)})


def _multi(directory: Path, port: int) -> Transfer:
    return _connector("MultiConnector", {"connectors": [_example(directory, port)]})


def _offloading(_: Path, __: int) -> Transfer:
    return _connector("OffloadingConnector", {"cpu_bytes_to_use": DRAM_BYTES})


def _offloading_files(directory: Path, _: int) -> Transfer:
    extra = {
        "cpu_bytes_to_use": DRAM_BYTES, "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": str(directory)}],
    }  # fmt: skip
    return _connector("OffloadingConnector", extra)


def _simple(_: Path, __: int) -> Transfer:
    return _connector("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": DRAM_BYTES})


def _lmcache_daemon(_: Path, port: int) -> Transfer:
    return _connector("LMCacheMPConnector", {"lmcache.mp.port": port})


def _records(directory: Path) -> list[Piece]:
    """Of this store: records of whole chunks."""
    path = directory / SLAB_NAME
    with opened(path) as slab:
        return [Piece(path, at, size) for at, size in sorted(_whole(slab))]


def _whole(slab: SlabFile) -> Iterator[tuple[int, int]]:
    for _, segment in slab.segments():
        if isinstance(segment, SegmentHeader):
            for record in slab.records(segment, payloads=True):
                header = record.header
                if record.state is RecordState.GOOD and header is not None:
                    if header.name.num_tokens == segment.chunk_tokens:
                        yield record.offset, segment.record_bytes


def _safetensors(directory: Path) -> list[Piece]:
    """Of ExampleConnector: the numbers of a prompt in a layer. Files of one layer stand together,
    so that the first two are of two prompts."""
    found = []
    for path in sorted(directory.rglob("*.safetensors"), key=lambda p: (p.name, p)):
        with path.open("rb") as file:
            (head,) = struct.unpack("<Q", file.read(8))
        size = path.stat().st_size
        found.append(Piece(path, 8 + head, size - 8 - head))
    return found


def _files(directory: Path) -> list[Piece]:
    """Of those that keep a file a chunk."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    sizes = [path.stat().st_size for path in paths]
    most = max(sizes, default=0)
    return [Piece(p, 0, size) for p, size in zip(paths, sizes, strict=True) if size == most > 0]


SYSTEMS: Final = {
    system.name: system
    for system in (
        System("attnstore", "this store, DRAM and NVMe", _attnstore, "attnstore-vllm",
               pieces=_records),
        System("example", "vLLM's ExampleConnector, a file a layer", _example,
               pieces=_safetensors),
        System("multi", "vLLM's MultiConnector over ExampleConnector", _multi,
               pieces=_safetensors),
        System("lmcache", "LMCache's daemon with files", _lmcache_daemon, "lmcache",
               pieces=_files, daemon=True),
        System("offloading", "vLLM's OffloadingConnector, DRAM", _offloading, keeps=False),
        System("offloading-files", "vLLM's OffloadingConnector with its file-system tier",
               _offloading_files, pieces=_files),
        System("simple-cpu", "vLLM's SimpleCPUOffloadConnector", _simple, keeps=False),
    )
}  # fmt: skip
