# SPDX-License-Identifier: Apache-2.0
"""Drafts of speculative decoding, and the KV that some of them keep beside the model's.

Their layers are regions like others. What their KV depends on:

- a draft model of its own: the tokens up to its own, as the model's KV does;
- EAGLE heads and MTP layers: the token after its own as well, since what they keep at token i is
  made of the model's hidden state there and of token i + 1. Of several MTP layers one after the
  other the n-th looks n tokens ahead; where those are guesses, the next step writes once more.

All keep it in their first pass over the tokens of a step. Later passes guess on, and write behind
the last accepted token, where the next step writes again. So what is right of the model's KV is
right of theirs, but for EAGLE's last token: a hit must end before it (index/sections.py: proven).
Which group their layers are in does not matter: all groups are treated alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")


def drafts_of(vllm_config: VllmConfig) -> Any:
    """vLLM's settings of drafts that keep KV; None if there are no such drafts."""
    drafts = vllm_config.speculative_config
    return None if drafts is None or drafts.method in _WITHOUT_KV else drafts


def draft_model_of(vllm_config: VllmConfig) -> ModelConfig | None:
    """The model that makes drafts, where it comes from other files than the model itself."""
    drafts, model = drafts_of(vllm_config), vllm_config.model_config
    draft: ModelConfig | None = getattr(drafts, "draft_model_config", None)
    if draft is None or (draft.model, draft.revision) == (model.model, model.revision):
        return None
    return draft


def tokens_ahead(vllm_config: VllmConfig) -> int:
    """On how many tokens behind it KV depends that drafts keep of a token."""
    drafts = drafts_of(vllm_config)
    if drafts is None or drafts.method == "draft_model":
        return 0
    return drafts.num_speculative_tokens if drafts.use_multi_module_mtp() else 1


def reason_of_drafts(vllm_config: VllmConfig) -> str | None:
    """Why this model cannot be served with its drafts, or None if it can."""
    drafts = drafts_of(vllm_config)
    if drafts is None:
        return None
    if drafts.method not in _WITH_KV:
        known = ", ".join((*_WITHOUT_KV, *_WITH_KV))
        return f"its drafts are made by {drafts.method!r}; {known} are known to be right"
    if drafts.parallel_drafting:
        return "its drafts are made in parallel, from tokens that are none (parallel_drafting)"
    return None
