# SPDX-License-Identifier: Apache-2.0
"""The namespace: a fingerprint of everything the bytes of KV depend on.

Two servers with one namespace would compute bytes that the other may read. When in doubt, a
thing is in: a difference that does not matter costs a prefill, one that is missed the answer.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from attnstore_vllm.engine_start import server_configured_at
from attnstore_vllm.identity.drafts import drafts_of
from attnstore_vllm.identity.model_files import check_files, files_of
from attnstore_vllm.identity.moved_files import FILE_CLOCK_S
from attnstore_vllm.identity.named_code import named_code
from attnstore_vllm.identity.own_code import NO_CODE
from attnstore_vllm.identity.rank import KvFacts
from attnstore_vllm.identity.vllm_settings import environment, plugins, section_of, settings_of
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

FORMAT = 3
"""Raise it whenever the same namespace would mean other bytes."""


def fingerprint(
    vllm_config: VllmConfig,
    geometry: Geometry,
    ranks: Sequence[KvFacts],
    version: str,
    weights: str,
) -> bytes:
    """32 bytes.

    Args:
        ranks: what each rank says of its KV tensors.
        version: vLLM's; its kernels decide the order of bytes within a page.
        weights: a quick look at them; the keys take in all of them (identity/weights.py).
    Raises: UnsupportedError for a setting that cannot be told from others.
    """
    facts = facts_of(vllm_config, geometry, ranks, version)
    facts["weights"] = weights
    try:  # once they are read: what changes from now on is not in these facts
        begun_at = server_configured_at() - FILE_CLOCK_S
        check_files(vllm_config, begun_at, has_own_code=_has_own_code(ranks))
    except (OSError, ValueError) as error:
        logger.warning(
            "AttnStore cannot tell the files beside the weights of %s: %s. What it stores now is "
            "not found again after a restart",
            vllm_config.model_config.model,
            error,
        )
        facts["changed"] = secrets.token_hex(16)
    return blake3(json.dumps(facts, sort_keys=True).encode()).digest()


def facts_of(
    vllm_config: VllmConfig, geometry: Geometry, ranks: Sequence[KvFacts], version: str
) -> dict[str, Any]:
    """All that is in the namespace but the weights, as plain data."""
    facts = {
        "format": FORMAT,
        "vllm": version,
        "settings": settings_of(vllm_config),
        "environment": environment(),
        "plugins": plugins(),
        "files": files_of(vllm_config, has_own_code=_has_own_code(ranks)),
        "geometry": geometry.facts(),
        "ranks": [rank.facts() for rank in ranks],
        **named_code(vllm_config),
    }
    drafts = drafts_of(vllm_config)
    return facts if drafts is None else facts | {"drafts": section_of(drafts)}


def _has_own_code(ranks: Sequence[KvFacts]) -> bool:
    """Whether a rank's model has code that no version tells."""
    return bool({dict(rank.live).get("code", NO_CODE) for rank in ranks} - {NO_CODE})
