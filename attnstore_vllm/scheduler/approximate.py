# SPDX-License-Identifier: Apache-2.0
"""Requests that are served with KV that a codec has changed, and how no other request ever is.

What an approximate codec (int8, fp8) decodes is not what was encoded, and what is computed behind
it has seen that. So a request that may have such KV
- names all that it finds and leaves by a lineage of its own (index/keys.py: approximate_root), on
  the disk and in DRAM, whether or not a chunk of it was decoded yet;
- has all its blocks in vLLM's prefix cache under names that exact requests cannot have: vLLM's own,
  hashed under a key that is drawn at the start. Such requests find each other's blocks by them.
What exact requests compute stays in DRAM: the disk would change it.
"""

from __future__ import annotations

import secrets

from attnstore_vllm.scheduler.hidden_blocks import KEY_BYTES, hide_blocks
from attnstore_vllm.scheduler.request import RequestState


class Approximate:
    """On the scheduler's thread.

    Args:
        codec: that changes KV (Codec.label); None: none does.
        by_default: requests that do not say so get such KV.
    """

    def __init__(self, codec: str | None, *, by_default: bool = False) -> None:
        self.codec = codec
        self._by_default = by_default
        self._key = secrets.token_bytes(KEY_BYTES)

    def begin(self, state: RequestState, wanted: bool | None) -> None:
        """The request has come. Before anything of it is looked up, here or by vLLM.

        Args:
            wanted: whether it has asked for approximate KV; None: it does not say.
        """
        assert self.codec is not None, "no codec changes anything"
        if self._by_default if wanted is None else wanted:
            state.approximate = self.codec
            hide_blocks(state.request, 0, self._key)
        else:
            state.dram_only = True
