# SPDX-License-Identifier: Apache-2.0
"""Architectures of vLLM's registry, made small from what transformers knows of their config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from attnstore_lab.testing.family_models import FAMILIES, VOCAB
from attnstore_lab.testing.tiny_tokenizer import write_tokenizer
from benchmarks.family_parts.fitting import FITTED, Fit

SMALL: Final[dict[str, Any]] = {
    "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    "hidden_size": 256, "n_embd": 256, "d_model": 256, "word_embed_proj_dim": 256,
    "intermediate_size": 512, "ffn_hidden_size": 512, "ffn_dim": 512, "n_inner": 512,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_attention_heads": 8, "n_head": 8,
    "n_heads": 8, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 32, "rotary_dim": 32,
    "max_position_embeddings": 4096, "n_positions": 4096, "max_seq_len": 4096,
    "sliding_window": 512, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1, "moe_topk": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
"""Those of these that a configuration has are set, the rest stays as transformers gives it."""


@cache
def others() -> tuple[str, ...]:
    """Architectures that vLLM's registry has for text, transformers too, and FAMILIES not."""
    from transformers import AutoConfig  # noqa: F401, PLC0415  (it fills the mapping)
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS  # noqa: PLC0415

    have = {family.config()["architectures"][0] for family in FAMILIES.values()}
    types = _types()
    return tuple(n for n in sorted(_TEXT_GENERATION_MODELS) if n in types and n not in have)


@cache
def _types() -> dict[str, str]:
    """Types of configuration by the class that transformers makes of them."""
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    found: dict[str, str] = {}
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            found.setdefault(name, kind)
    return found


def make_small(architecture: str, directory: Path) -> Path:
    """A directory with the config.json of a small model of this architecture. No weights."""
    from transformers import AutoConfig  # noqa: PLC0415

    fit = FITTED.get(architecture, Fit())
    kind = fit.kind or _types()[architecture]
    there = AutoConfig.for_model(kind).to_dict().keys() - {"model_type"}
    values = {name: value for name, value in (SMALL | dict(fit.fields)).items() if name in there}
    config = json.loads(json.dumps(AutoConfig.for_model(kind, **values).to_dict(), default=str))
    config.update(model_type=kind, architectures=[architecture], dtype="bfloat16")
    config.update(fit.fields)
    for name in fit.without:
        del config[name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if fit.special_tokens:
        _write_tokenizer(directory, fit.special_tokens)
    return directory


def _write_tokenizer(directory: Path, special: Sequence[str]) -> None:
    """For prompts of token numbers it only has to be there, with these."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    write_tokenizer(directory, VOCAB - len(special), max_length=4096)
    made = AutoTokenizer.from_pretrained(directory)
    made.add_tokens(list(special), special_tokens=True)
    made.save_pretrained(directory)


def needs_images(name: str) -> bool:
    """vLLM imports what its relative that sees images needs."""
    return (FAMILIES[name] if name in FAMILIES else FITTED.get(name, Fit())).needs_images


def arguments(architecture: str, models: Path) -> dict[str, Any]:
    """Arguments of vllm.LLM."""
    fit = FITTED.get(architecture, Fit())
    return {
        "model": str(make_small(architecture, models / architecture)),
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 4096,
        "skip_tokenizer_init": not fit.special_tokens,
        **fit.options,
    }
