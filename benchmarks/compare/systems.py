# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared, and how each is started: pure functions of the sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from attnstore_vllm.errors import ConfigError
from benchmarks.compare.sizes import GIB, Sizes

SERVED_NAME: Final = "bench"
DISK_SPARE: Final = 1.2
NOT_FOR_USERS: Final = (
    "--host", "--port", "--served-model-name", "--max-model-len", "--block-size",
    "--num-gpu-blocks-override", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details",
    "--enable-logging-iteration-details", "--no-enable-logging-iteration-details",
    "--kv-transfer-config",
    "--kv-offloading-size",  # another connector
    "--uds", "--headless", "--api-key", "--ssl-keyfile", "--ssl-certfile",  # not to be asked
    "--config",  # a file with any of these
)  # fmt: skip
"""Of `vllm serve`: what makes the systems what they are, and where each listens."""


@dataclass(frozen=True, slots=True)
class Here:
    """What the machine has that a system may need.

    Args:
        free_bytes: of the disk that the servers write to.
        has_lmcache: LMCache can be imported.
    """

    is_cpu_build: bool
    free_bytes: int
    has_lmcache: bool = False


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve.

    Args:
        keeps_hbm: vLLM's own prefix cache is on.
        has_large_hbm: HBM holds the whole working set.
        connector: vLLM's name of its KV connector.
        eviction: of this store.
        needs_gpu: does nothing on vLLM's CPU build.
    """

    name: str
    words: str
    keeps_hbm: bool = True
    has_large_hbm: bool = False
    connector: str | None = None
    eviction: str | None = None
    needs_gpu: bool = False

    def hbm_tokens(self, sizes: Sizes) -> int:
        return sizes.bound_tokens if self.has_large_hbm else sizes.hbm_tokens


RE: Final = System("re", "no prefix cache at all: every prompt is computed", keeps_hbm=False)
BOUND: Final = System("bound", "vLLM's own prefix cache, HBM for everything", has_large_hbm=True)
_OURS: Final = "AttnStoreConnector"
SYSTEMS: Final = (
    RE,
    System("vllm", "vLLM's own prefix cache"),
    System("attnstore", "this store", connector=_OURS, eviction="attnstore"),
    System("attnstore-lru", "this store, eviction: lru", connector=_OURS, eviction="lru"),
    System("attnstore-fifo", "this store, eviction: fifo", connector=_OURS, eviction="fifo"),
    BOUND,
    System("example", "vLLM's ExampleConnector: a file a layer", connector="ExampleConnector"),
    System("offloading", "vLLM's OffloadingConnector: DRAM alone",
           connector="OffloadingConnector", needs_gpu=True),
    System("lmcache", "LMCache's daemon", connector="LMCacheMPConnector"),
)  # fmt: skip


def chosen(names: str) -> list[System]:
    """ "all", or names with commas. In the order in which they run. Raises: ConfigError."""
    known = {system.name: system for system in SYSTEMS}
    if names == "all":
        return list(SYSTEMS)
    for name in names.split(","):
        if name not in known:
            raise ConfigError(f"--systems: {name!r} is unknown; there are {', '.join(known)}")
    return [system for system in SYSTEMS if system.name in names.split(",")]


def check_more(more: Sequence[str]) -> None:
    """Refuse arguments that would come after those of `arguments`, and count in their place.

    Raises: ConfigError.
    """
    for word in more:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        # vLLM takes the beginning of a name for the name.
        if len(name) > 2 and any(taken.startswith(name) for taken in NOT_FOR_USERS):
            raise ConfigError(
                f"--serve: {word!r} is not for it: where a server listens, its sizes, its cache "
                "and its connector are set by compare itself; its own options are "
                "--max-model-len, --block-tokens, --hbm-tokens and --store"
            )


def why_not(system: System, sizes: Sizes, here: Here) -> str | None:
    """Why a system cannot run here; None if it can."""
    if system.needs_gpu and here.is_cpu_build:
        return "needs a GPU"
    if system.name == "lmcache" and not here.has_lmcache:
        return "LMCache is not installed"
    written = {"example": sizes.written_bytes, "lmcache": sizes.nvme_bytes}.get(system.name, 0)
    if system.eviction is not None:
        written = sizes.nvme_bytes
    if written * DISK_SPARE > here.free_bytes:
        return (
            f"writes up to {written / GIB:.1f} GiB, and the disk of --workdir has "
            f"{here.free_bytes / GIB:.1f} GiB free"
        )
    return None


def arguments(
    system: System,
    sizes: Sizes,
    directory: str,
    *,
    store: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
    port: int = 0,
) -> list[str]:
    """What stands after `vllm serve MODEL`.

    Args:
        directory: of this server's own, empty.
        store: settings of this store, over those that are made here.
        more: arguments of the user's own, which `check_more` has seen.
        port: of LMCache's daemon.
    """
    found = [
        "--served-model-name", SERVED_NAME,
        "--max-model-len", str(sizes.context_tokens),
        "--block-size", str(sizes.block_tokens),
        "--num-gpu-blocks-override", str(sizes.blocks(system.hbm_tokens(sizes)) + 1),
        "--enable-prefix-caching" if system.keeps_hbm else "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-logging-iteration-details",
    ]  # fmt: skip
    if system.connector is not None:
        extra: dict[str, Any] = {}
        if system.eviction is not None:
            nvme = {"path": f"{directory}/kv", "capacity": sizes.nvme_bytes}
            extra = {"dram": sizes.dram_bytes, "nvme": nvme, "eviction": system.eviction}
            extra |= store or {}
        elif system.name == "example":
            extra = {"shared_storage_path": f"{directory}/kv"}
        elif system.name == "offloading":
            extra = {"cpu_bytes_to_use": sizes.dram_bytes}
        else:
            extra = {"lmcache.mp.port": port}
        connector = {"kv_connector": system.connector, "kv_role": "kv_both"}
        found += [
            "--kv-transfer-config",
            json.dumps(connector | {"kv_connector_extra_config": extra}),
        ]
    return [*found, *more]


def environment(system: System, sizes: Sizes) -> dict[str, str]:
    """For vLLM's CPU build, which wants to know its HBM in GiB; and no telemetry of LMCache's."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(sizes.cpu_space_gib(system.hbm_tokens(sizes))),
        "LMCACHE_TRACK_USAGE": "false",
    }
