# SPDX-License-Identifier: Apache-2.0
"""The namespace: a fingerprint of everything the bytes of KV depend on.

Two servers with one namespace would compute bytes that the other may read. When in doubt, a
thing is in: a difference that does not matter costs a prefill, one that is missed the answer.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from attnstore_vllm.connector.model_files import files_of
from attnstore_vllm.connector.rank import KvFacts
from attnstore_vllm.connector.settings import environment, settings_of
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

FORMAT = 2
"""Raise it whenever the same namespace would mean other bytes."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 8


def fingerprint(
    vllm_config: VllmConfig, geometry: Geometry, ranks: Sequence[KvFacts], version: str
) -> bytes:
    """32 bytes. Cost: reads up to 8 MiB of each weight file, once at start.

    Args:
        ranks: what each rank says of its KV tensors.
        version: vLLM's; its kernels decide the order of bytes within a page.
    Raises: UnsupportedError for a setting that cannot be told from others.
    """
    facts = facts_of(vllm_config, geometry, ranks, version)
    model = vllm_config.model_config
    facts["weights"] = weights_identity(model.model, model.revision, _load_format(vllm_config))
    return blake3(json.dumps(facts, sort_keys=True).encode()).digest()


def facts_of(
    vllm_config: VllmConfig, geometry: Geometry, ranks: Sequence[KvFacts], version: str
) -> dict[str, Any]:
    """All that is in the namespace but the weights, as plain data."""
    return {
        "format": FORMAT,
        "vllm": version,
        "settings": settings_of(vllm_config),
        "environment": environment(),
        "files": files_of(vllm_config),
        "geometry": asdict(geometry),
        "ranks": [asdict(rank) for rank in ranks],
    }


def _load_format(vllm_config: VllmConfig) -> str:
    return str(vllm_config.load_config.load_format)


def weights_identity(model: str, revision: str | None, load_format: str) -> str:
    """What tells these weights from others.

    Local files are told by name, size, time and samples of their content; a model of the hub
    by the files it was resolved to. Weights that cannot be told (streamed from elsewhere) get
    a random identity: nothing of them is found again after a restart.
    """
    if load_format == "dummy":
        return f"dummy weights of {model}"  # made from a fixed seed
    directory = Path(model) if os.path.isdir(model) else _hub_snapshot(model, revision)
    files = sorted(directory.iterdir()) if directory is not None else []
    weights = [file for file in files if file.suffix in _WEIGHT_SUFFIXES]
    if os.path.isfile(model):
        weights = [Path(model)]
    if not weights:
        logger.warning(
            "AttnStore cannot identify the weights of %s; what it stores now will not be used "
            "after a restart", model,
        )  # fmt: skip
        return secrets.token_hex(16)
    hasher = blake3()
    for file in weights:
        _add_file(hasher, file)
    return hasher.hexdigest()


def _hub_snapshot(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision or "main")
    except ValueError:  # not the name of a hub model
        return None
    return Path(found).parent if isinstance(found, str) else None


def _add_file(hasher: blake3, file: Path) -> None:
    stat = file.stat()
    hasher.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    with file.open("rb") as stream:
        for i in range(_SAMPLES):
            stream.seek(i * max(0, stat.st_size - _SAMPLE_BYTES) // max(1, _SAMPLES - 1))
            hasher.update(stream.read(_SAMPLE_BYTES))
