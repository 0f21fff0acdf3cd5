# SPDX-License-Identifier: Apache-2.0
"""The files of a model that are not its weights and yet decide what is computed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PROCESSING = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What becomes of pictures, sounds and videos before the model sees them."""


def model_directory(vllm_config: VllmConfig) -> Path | None:
    """Where the model's files are: its own directory, or a snapshot of the hub's cache."""
    model, revision = vllm_config.model_config.model, vllm_config.model_config.revision
    if os.path.isdir(model):
        return Path(model)
    if os.path.isfile(model):
        return Path(model).parent
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(
            model, "config.json", revision=revision or "main",
            cache_dir=vllm_config.load_config.download_dir,
        )  # fmt: skip
    except ValueError:  # not the name of a hub model
        return None
    return Path(found).parent if isinstance(found, str) else None


def files_of(vllm_config: VllmConfig) -> dict[str, str]:
    """Names of such files and digests of their content."""
    directory, model = model_directory(vllm_config), vllm_config.model_config
    files = [] if directory is None else [directory / name for name in _PROCESSING]
    if directory is not None and model.trust_remote_code:
        files += sorted(directory.glob("*.py"))
    scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        files.append(Path(scales))
    return {file.name: blake3(file.read_bytes()).hexdigest() for file in files if file.is_file()}
