# SPDX-License-Identifier: Apache-2.0
"""Small models of the families that people serve, made on the spot: nothing is downloaded.

It is long since each family has its config here.

    family = FAMILIES["gemma3"]
    LLM(**family.arguments(Path("models")))

Each has the groups of KV cache that its large relatives have: sliding windows, chunks, recurrent
states, latents, drafts. Weights are random, of the size that transformers starts with, so that an
answer hangs on the whole prompt. Answers are computed in float32 where vLLM's CPU kernels can.

A family says how its weights are made. "file": by transformers, into a file. "dummy": by vLLM at
its start, where transformers does not know the family; such answers hang less on the prompt.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch

VERSION: Final = 1  # raise it when the same configuration would give other weights
MADE_BY: Final = "family.json"
SEED: Final = 1
VOCAB: Final = 2_048
WINDOW: Final = 512
NARROW: Final = 128
"""Tokens of the windows, gpt-oss's and MiMo's being the narrow ones; and of Llama 4's chunks."""

Config = dict[str, Any]
COMMON: Final[Config] = {
    "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8_192,
    "initializer_range": 0.08,
}  # fmt: skip
NO_HEAD_DIM: Final = {name: value for name, value in COMMON.items() if name != "head_dim"}
HYBRID_OFF: Final = {"disable_hybrid_kv_cache_manager": True}
CACHED: Final = {"enable_prefix_caching": True}
"""vLLM leaves it off for recurrent models unless told."""
FLOAT_STATES: Final = {**CACHED, "mamba_ssm_cache_dtype": "float32"}
"""vLLM takes that by itself where the CPU has AVX-512 BF16; blocks shall be the same anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One small model, and how vLLM is started with it."""

    name: str
    stands_for: str
    """For people: the models that it is like."""
    config: Callable[[], Config]
    """The content of its config.json."""
    dtype: str = "float32"
    weights: str = "file"
    edges: tuple[int, ...] = ()
    """Windows, chunks and blocks, in tokens, whose neighbourhood is worth a look."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vllm.LLM."""
    draft: str = ""
    """The family that makes drafts; named in options by `speculative_config`."""
    needs_images: bool = False
    """vLLM has it with its relative that sees images, and imports what that one needs."""

    def arguments(self, models: Path) -> dict[str, Any]:
        """Arguments of vllm.LLM, after the model was made below `models`."""
        model = make_family(models / self.name, self)
        found = {
            "model": str(model), "dtype": self.dtype, "max_model_len": 4_096,
            "skip_tokenizer_init": True, "load_format": "auto", **self.options,
        }  # fmt: skip
        if self.weights == "dummy":
            found["load_format"] = "dummy"
        if self.draft:
            other = FAMILIES[self.draft]
            drafts = dict(found["speculative_config"])
            drafts["model"] = str(make_family(models / other.name, other))
            found["speculative_config"] = drafts
        return found


FAMILIES: Final[dict[str, Family]] = {}


def make_family(directory: Path, family: Family) -> Path:
    """Make a model directory; return its path. One that holds the same model is used as it is.

    Raises: FileExistsError if `directory` holds anything else than a model made here.
    """
    config = family.config()
    recipe = {"version": VERSION, "weights": family.weights, "config": _digest(config)}
    if _is_made_by(directory, recipe):
        return directory
    if directory.exists() and not (directory / MADE_BY).exists():
        raise FileExistsError(f"{directory} holds something else than a model made here")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as parent:
        made = Path(parent) / "model"
        made.mkdir()
        if family.weights == "file":
            _write_weights(made, config)
        for name, content in (config.pop("files", None) or {}).items():
            (made / name).write_text(content, encoding="utf-8")
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (made / MADE_BY).write_text(json.dumps(recipe), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)
    return directory


def _digest(config: Config) -> str:
    return sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _is_made_by(directory: Path, recipe: Mapping[str, object]) -> bool:
    try:
        found = json.loads((directory / MADE_BY).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return bool(found == recipe)


def _write_weights(directory: Path, config: Config) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    plain = {name: value for name, value in config.items() if name != "architectures"}
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain), dtype=torch.float32)
        model.save_pretrained(directory)


def config_of(kind: str, architecture: str, **values: Any) -> Callable[[], Config]:
    """A maker of the config.json that transformers writes for a model of this type."""

    def make() -> Config:
        from transformers import AutoConfig  # noqa: PLC0415

        found = AutoConfig.for_model(kind, **values).to_dict()
        found.update(model_type=kind, architectures=[architecture], dtype="float32")
        return dict(json.loads(json.dumps(found)))

    return make


def _changed(make: Callable[[], Config], **values: Any) -> Callable[[], Config]:
    """The same with other values, None for what is to be left out."""

    def changed() -> Config:
        found = {**make(), **values}
        return {
            name: value for name, value in found.items() if name not in values or value is not None
        }

    return changed


def _family(name: str, stands_for: str, config: Callable[[], Config], **more: Any) -> Family:
    FAMILIES[name] = Family(name=name, stands_for=stands_for, config=config, **more)
    return FAMILIES[name]


def _variant(of: str, name: str, stands_for: str, **more: Any) -> None:
    """Another way of starting the same model."""
    base = FAMILIES[of]
    FAMILIES[name] = Family(
        name=name, stands_for=stands_for, config=base.config, edges=base.edges,
        **{"weights": base.weights, "dtype": base.dtype, **more},
    )  # fmt: skip


# ---- full attention ---------------------------------------------------------------------------

_llama = config_of("llama", "LlamaForCausalLM", **COMMON, num_hidden_layers=6)
_family("llama", "Llama, Qwen 2 and 3", _llama)
_variant("llama", "llama_no_prefix_cache", "`--no-enable-prefix-caching`",
         options={"enable_prefix_caching": False})  # fmt: skip
_variant("llama", "llama_fp8", "`--kv-cache-dtype fp8`", options={"kv_cache_dtype": "fp8"},
         dtype="bfloat16")  # fmt: skip
_variant("llama", "llama_fp8_e5m2", "`--kv-cache-dtype fp8_e5m2`",
         options={"kv_cache_dtype": "fp8_e5m2"}, dtype="bfloat16")  # fmt: skip
_variant("llama", "llama_fp8_skip", "fp8 but for two layers", dtype="bfloat16",
         options={"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "1"]})  # fmt: skip
_variant("llama", "llama_turboquant", "`--kv-cache-dtype turboquant_k8v4`", dtype="bfloat16",
         options={"kv_cache_dtype": "turboquant_k8v4"})  # fmt: skip
_variant("llama", "llama_fp8_token_head", "`--kv-cache-dtype fp8_per_token_head`",
         options={"kv_cache_dtype": "fp8_per_token_head"}, dtype="bfloat16")  # fmt: skip
_variant("llama", "llama_int8_token_head", "`--kv-cache-dtype int8_per_token_head`",
         options={"kv_cache_dtype": "int8_per_token_head"}, dtype="bfloat16")  # fmt: skip
_family("mixtral", "Mixtral", config_of(
    "mixtral", "MixtralForCausalLM", **COMMON, num_hidden_layers=4, num_local_experts=4,
    num_experts_per_tok=2,
), dtype="bfloat16")  # fmt: skip

NAS_CODE: Final = """\
from transformers import PretrainedConfig


class Part:
    def __init__(self, values):
        self.__dict__.update(values)


class Block:
    def __init__(self, values):
        self.values = values
        self.attention, self.ffn = Part(values["attention"]), Part(values["ffn"])


class DeciLMConfig(PretrainedConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=None, **others):
        super().__init__(**others)
        self.tie_word_embeddings = False
        self.block_configs = [b if isinstance(b, Block) else Block(b) for b in block_configs or []]

    def to_dict(self):
        return {**super().to_dict(), "block_configs": [b.values for b in self.block_configs]}
"""


def _nemotron_nas() -> Config:
    """Its configuration is code of the model's own."""
    kept = {"no_op": False, "replace_with_linear": False}
    blocks = [
        {"attention": {"n_heads_in_group": n, **kept}, "ffn": {"ffn_mult": 2.0, "no_op": False,
         "replace_with_linear": False}}
        for n in (2, 4, 4, 8)
    ]  # fmt: skip
    return {
        **NO_HEAD_DIM, "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas",
        "dtype": "float32", "num_hidden_layers": len(blocks), "num_key_value_heads": None,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "block_configs": blocks, "files": {"configuration_decilm.py": NAS_CODE},
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
    }  # fmt: skip


_family("nemotron_nas", "Nemotron-NAS, DeciLM: layers of several kinds", _nemotron_nas,
        weights="dummy", options={"trust_remote_code": True})  # fmt: skip

# ---- windows and chunks -----------------------------------------------------------------------

_family("mistral_window", "Mistral with a window, Phi-3: windows only", config_of(
    "mistral", "MistralForCausalLM", **COMMON, num_hidden_layers=6, sliding_window=WINDOW,
), edges=(128, 256, WINDOW, 2 * WINDOW))  # fmt: skip
_family("phi3_window", "Phi-3 with a window", config_of(
    "phi3", "Phi3ForCausalLM", **NO_HEAD_DIM, num_hidden_layers=4, sliding_window=WINDOW,
), edges=(128, 256, WINDOW))  # fmt: skip
_family("gemma2", "Gemma 2", config_of(
    "gemma2", "Gemma2ForCausalLM", **COMMON, num_hidden_layers=6, sliding_window=WINDOW,
    query_pre_attn_scalar=32,
), edges=(128, 256, WINDOW))  # fmt: skip
_family("gemma3", "Gemma 3: five windows, then one full", config_of(
    "gemma3_text", "Gemma3ForCausalLM", **COMMON, num_hidden_layers=12, sliding_window=WINDOW,
    query_pre_attn_scalar=32,
), edges=(128, 256, WINDOW, 2 * WINDOW))  # fmt: skip
_variant("gemma3", "gemma3_hybrid_off", "Gemma 3, hybrid manager off", options=HYBRID_OFF)
_family("gemma3n", "Gemma 3n: layers that use others' KV", config_of(
    "gemma3n_text", "Gemma3nForCausalLM", **COMMON, num_hidden_layers=10, sliding_window=WINDOW,
    num_kv_shared_layers=4, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=32,
    laurel_rank=8, activation_sparsity_pattern=10 * [0.0],
    layer_types=2 * [*4 * ["sliding_attention"], "full_attention"],
), edges=(128, 256, WINDOW))  # fmt: skip
_variant("gemma3n", "gemma3n_hybrid_off", "Gemma 3n, hybrid manager off", options=HYBRID_OFF)
_family("gemma4", "Gemma 4: blocks of two sizes", config_of(
    "gemma4_text", "Gemma4ForCausalLM", **COMMON, num_hidden_layers=12, sliding_window=WINDOW,
    global_head_dim=64, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=VOCAB,
), edges=(128, 256, WINDOW, 2 * WINDOW))  # fmt: skip
_variant("gemma4", "gemma4_hybrid_off", "Gemma 4, hybrid manager off", options=HYBRID_OFF)
_family("cohere2", "Command R7B, Command A", config_of(
    "cohere2", "Cohere2ForCausalLM", **COMMON, num_hidden_layers=8, sliding_window=WINDOW,
    sliding_window_pattern=4,
), edges=(128, 256, WINDOW, WINDOW + 1))  # fmt: skip
_family("olmo3", "OLMo 3", config_of(
    "olmo3", "Olmo3ForCausalLM", **NO_HEAD_DIM, num_hidden_layers=8, sliding_window=WINDOW,
), edges=(128, 256, WINDOW))  # fmt: skip
_family("gpt_oss", "gpt-oss: narrow windows, sinks", config_of(
    "gpt_oss", "GptOssForCausalLM", **{**COMMON, "head_dim": 64}, num_hidden_layers=8,
    sliding_window=NARROW, num_local_experts=4, num_experts_per_tok=2,
), edges=(128, 256, 384))  # fmt: skip
_variant("gpt_oss", "gpt_oss_hybrid_off", "gpt-oss, hybrid manager off", options=HYBRID_OFF)
_family("llama4", "Llama 4: attention within chunks", config_of(
    "llama4_text", "Llama4ForCausalLM", **COMMON, num_hidden_layers=8, attention_chunk_size=WINDOW,
    num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=512,
), edges=(128, 256, WINDOW, 2 * WINDOW))  # fmt: skip
_variant("llama4", "llama4_hybrid_off", "Llama 4, hybrid manager off", options=HYBRID_OFF)
_family("mimo_v2", "MiMo V2: more KV heads in windows", _changed(config_of(
    "mimo_v2_flash", "MiMoV2FlashForCausalLM", **COMMON, num_hidden_layers=8, sliding_window=NARROW,
), v_head_dim=32, hybrid_layer_pattern=2 * [0, 1, 1, 1], swa_num_key_value_heads=4,
    swa_num_attention_heads=8, swa_head_dim=32, swa_v_head_dim=32, sliding_window_size=NARROW,
    layernorm_epsilon=1e-5, moe_layer_freq=8 * [0], n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=64, partial_rotary_factor=0.5, rope_theta=1e4, swa_rope_theta=1e4,
    add_swa_attention_sink_bias=False, add_full_attention_sink_bias=False,
    attention_value_scale=1.0, layer_types=None, mlp_layer_types=None,
), edges=(128, 256, 384), weights="dummy")  # fmt: skip
_variant("mimo_v2", "mimo_v2_hybrid_off", "MiMo V2, hybrid manager off", options=HYBRID_OFF)

# ---- recurrent states -------------------------------------------------------------------------

_GDN: Final[Config] = {
    **COMMON, "num_hidden_layers": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
_family("qwen3_next", "Qwen3-Next: gated delta nets and full attention", config_of(
    "qwen3_next", "Qwen3NextForCausalLM", **_GDN, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=64, shared_expert_intermediate_size=64, decoder_sparse_step=1,
), edges=(256, 384, 768), dtype="bfloat16", options=FLOAT_STATES)  # fmt: skip
_family("qwen3_5", "Qwen3.5, text", config_of("qwen3_5_text", "Qwen3_5ForCausalLM", **_GDN),
        needs_images=True, edges=(256, 384, 768), dtype="bfloat16",
        options=FLOAT_STATES)  # fmt: skip
_family("lfm2", "LFM2: short convolutions", _changed(config_of(
    "lfm2", "Lfm2ForCausalLM", **NO_HEAD_DIM, num_hidden_layers=6,
    layer_types=2 * ["conv", "conv", "full_attention"], conv_bias=False, conv_L_cache=3,
    block_multiple_of=64, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False,
), conv_dim=256, block_dim=256), edges=(128, 256), options=CACHED)  # fmt: skip
_MAMBA2: Final = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64}
_family("jamba", "Jamba: Mamba 1", config_of(
    "jamba", "JambaForCausalLM", **NO_HEAD_DIM, num_hidden_layers=8, attn_layer_period=4,
    attn_layer_offset=2, expert_layer_period=2, num_experts=2, num_experts_per_tok=1,
    mamba_d_state=16, use_mamba_kernels=False,
), dtype="bfloat16", options=CACHED)  # fmt: skip
_family("granite4", "Granite 4: Mamba 2", config_of(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", **NO_HEAD_DIM, **_MAMBA2,
    num_hidden_layers=6, layer_types=2 * ["mamba", "mamba", "attention"],
    shared_intermediate_size=256, num_local_experts=0, position_embedding_type=None,
), dtype="bfloat16", options=CACHED)  # fmt: skip
_family("falcon_h1", "Falcon-H1: Mamba 2 beside attention", config_of(
    "falcon_h1", "FalconH1ForCausalLM", **NO_HEAD_DIM, **_MAMBA2, num_hidden_layers=4,
    mamba_d_ssm=512,
), dtype="bfloat16", options=CACHED)  # fmt: skip
_family("nemotron_h", "Nemotron-H: Mamba 2", config_of(
    "nemotron_h", "NemotronHForCausalLM", **COMMON, hybrid_override_pattern="M-M*-M*-",
    num_hidden_layers=8, mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=64, n_groups=1,
), dtype="bfloat16", weights="dummy", options=CACHED)  # fmt: skip
_family("mamba2", "Mamba 2: no attention", config_of(
    "mamba2", "Mamba2ForCausalLM", vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    hidden_size=256, num_hidden_layers=4, num_heads=8, head_dim=64, state_size=64, n_groups=1,
    expand=2,
), dtype="bfloat16", options=CACHED)  # fmt: skip

# ---- latents ----------------------------------------------------------------------------------

_LATENT: Final[Config] = {
    **NO_HEAD_DIM, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "topk_group": 1,
    "n_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
_family("deepseek_v2", "DeepSeek V2: MLA", config_of(
    "deepseek_v2", "DeepseekV2ForCausalLM", **_LATENT, q_lora_rank=None,
), dtype="bfloat16")  # fmt: skip
_family("deepseek_v3", "DeepSeek V3, Kimi K2: MLA", config_of(
    "deepseek_v3", "DeepseekV3ForCausalLM", **_LATENT, q_lora_rank=128, num_nextn_predict_layers=1,
), dtype="bfloat16", weights="dummy")  # fmt: skip

# ---- drafts -----------------------------------------------------------------------------------

_variant("llama", "llama_ngram", "n-gram drafts", options={"speculative_config": {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,
}})  # fmt: skip
_family("draft_same", "a draft model of the same KV", config_of(
    "llama", "LlamaForCausalLM", **COMMON, num_hidden_layers=2,
))  # fmt: skip
_family("draft_other", "a draft model of other KV", config_of(
    "llama", "LlamaForCausalLM", num_hidden_layers=2,
    **{**COMMON, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1},
))  # fmt: skip
_family("eagle_head", "an EAGLE head", config_of(
    "llama", "EagleLlamaForCausalLM", **COMMON, num_hidden_layers=1,
), weights="dummy")  # fmt: skip
_family("eagle3_head", "an EAGLE-3 head", config_of(
    "llama", "LlamaForCausalLMEagle3", **COMMON, num_hidden_layers=1, draft_vocab_size=VOCAB,
), weights="dummy")  # fmt: skip
for _name, _draft, _method, _what in (
    ("llama_draft_same", "draft_same", "draft_model", "Llama and a draft model, same KV shape"),
    ("llama_draft_other", "draft_other", "draft_model", "Llama and a draft model, other KV shape"),
    ("llama_eagle", "eagle_head", "eagle", "Llama and an EAGLE head"),
):
    _variant(
        "llama", _name, _what, draft=_draft, weights=FAMILIES[_draft].weights,
        options={"speculative_config": {"method": _method, "num_speculative_tokens": 2}},
    )  # fmt: skip
# An EAGLE-3 head takes the hidden states of three layers.
_family("llama_eagle3", "Llama and an EAGLE-3 head", config_of(
    "llama", "LlamaForCausalLM", **COMMON, num_hidden_layers=8,
), draft="eagle3_head", weights="dummy",
    options={"speculative_config": {"method": "eagle3", "num_speculative_tokens": 2}})  # fmt: skip
_family("mimo_mtp", "MiMo and its MTP layer", config_of(
    "qwen2", "MiMoForCausalLM", **COMMON, num_hidden_layers=3, num_nextn_predict_layers=1,
), weights="dummy",
    options={"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}})  # fmt: skip
for _name, _draft, _method, _what in (
    ("gpt_oss_eagle", "eagle_head", "eagle", "gpt-oss and an EAGLE head"),
    ("gpt_oss_eagle3", "eagle3_head", "eagle3", "gpt-oss and an EAGLE-3 head"),
):
    _variant(
        "gpt_oss", _name, _what, draft=_draft, weights="dummy",
        options={"speculative_config": {"method": _method, "num_speculative_tokens": 2}},
    )  # fmt: skip

DRAFTS: Final = ("draft_same", "draft_other", "eagle_head", "eagle3_head")
"""Members of FAMILIES that serve others only."""
