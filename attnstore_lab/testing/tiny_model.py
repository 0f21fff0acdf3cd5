# SPDX-License-Identifier: Apache-2.0
"""Small Llama models of any shape, made on the spot: nothing is downloaded.

The weights are random, but not careless; the same shape and seed give the same bytes.

- Answers depend on the KV of single tokens far back, so that wrong KV shows as a wrong answer:
  one head of the last layer, the *speaker*, looks sharply at one or two tokens, and the model's
  next token is the partner (a fixed permutation) of what it sees there.
- The best token is clearly better than the second: half of the gaps are above 10 in logits that
  bf16 rounds at 0.06. With plain random weights one gap in fifteen is within rounding.
- Half of the residual stream holds the token and is written by the speaker only; the layers write
  to the other, quiet half. So rounding that grows from layer to layer has little weight, and
  about one greedy token in a thousand changes with the batch it is computed in.
- Greedy answers wander and do not get stuck.
- Special tokens have logit 0 and are never the best.
"""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from attnstore_lab.testing.tiny_tokenizer import (
    CHAT_TEMPLATE,
    END_ID,
    SPECIAL_TOKENS,
    build_tokenizer,
    write_tokenizer,
)

TICK_S = 0.03
"""Some ticks of a file system's clock: what is as young as the start of a server counts as changed
since."""
RECIPE_VERSION: Final = 2  # raise it when the same recipe would give other bytes
RECIPE_FILE: Final = "recipe.json"
ROPE_THETA: Final = 10_000.0
NORM_EPS: Final = 1e-5

# Standard deviations, times 1/sqrt(fan_in). Found by trying: the text above is what they do.
QUERY_KEY_GAIN: Final = 1.5
LAST_QUERY_KEY_GAIN: Final = 2.5
BRANCH_GAIN: Final = 0.1
QUIET_SCALE: Final = 0.1
SPEAKER_GAIN: Final = 4.0
LOGIT_GAIN: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers that a Llama config needs. Counts; `vocab` and `max_position` are in tokens."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 4_096
    max_position: int = 4_096

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; it must be a multiple of {self.kv_heads}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V, all layers, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Of all matrices, in bf16."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate
        return 2 * (self.layers * layer + 2 * self.vocab * self.hidden)


TINY: Final = ModelShape(
    layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocab=1_024
)
# LLaMA, LLaMA-2-70B and Falcon in small: a KV head for each head, for eight of them, for all.
MHA: Final = ModelShape(
    layers=2, hidden=256, intermediate=512, heads=4, kv_heads=4, head_dim=128, vocab=1_024
)
GQA: Final = ModelShape(
    layers=2, hidden=256, intermediate=512, heads=16, kv_heads=2, head_dim=128, vocab=1_024
)
MQA: Final = ModelShape(
    layers=2, hidden=256, intermediate=512, heads=8, kv_heads=1, head_dim=64, vocab=1_024
)
# The demo's model: 26M parameters, 8 KiB of KV a token.
SMALL: Final = ModelShape(
    layers=8, hidden=512, intermediate=1_280, heads=8, kv_heads=4, head_dim=64
)
# 0.35B parameters, 24 KiB of KV a token: 98 MB for 4,000 tokens.
MEDIUM: Final = ModelShape(
    layers=24, hidden=1_024, intermediate=3_840, heads=16, kv_heads=4, head_dim=64
)


def make_model(directory: Path, shape: ModelShape, *, seed: int = 0, weights: bool = True) -> Path:
    """Make a model directory that vLLM and transformers can load; return its path.

    A directory that holds the same recipe is used as it is, one that holds another recipe is
    replaced. It is built beside its final place and renamed, so that half of it is never seen.
    weights=False writes config and tokenizer only, for `--load-format dummy`.

    Raises: FileExistsError if `directory` holds anything else than a model made here.
    Cost: two bytes a parameter on disk, four in memory for the largest tensor.
    """
    recipe = _recipe(shape, seed, weights)
    if _same_recipe(directory, recipe):
        return directory
    if directory.exists() and not (directory / RECIPE_FILE).exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} holds something else than a model made by make_model")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as parent:
        made = Path(parent) / "model"
        made.mkdir()
        _write_json(made / "config.json", _config(shape))
        write_tokenizer(made, shape.vocab, shape.max_position)
        if weights:
            _write_weights(made / "model.safetensors", shape, seed)
        _write_json(made / RECIPE_FILE, recipe)
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)
    time.sleep(TICK_S)
    return directory


def _recipe(shape: ModelShape, seed: int, weights: bool) -> dict[str, object]:
    tokenizer = build_tokenizer(shape.vocab).to_str() + CHAT_TEMPLATE
    return {
        "version": RECIPE_VERSION,
        "shape": asdict(shape),
        "seed": seed,
        "weights": weights,
        "gains": [
            QUERY_KEY_GAIN,
            LAST_QUERY_KEY_GAIN,
            BRANCH_GAIN,
            QUIET_SCALE,
            SPEAKER_GAIN,
            LOGIT_GAIN,
        ],
        "tokenizer": sha256(tokenizer.encode()).hexdigest(),
    }


def _same_recipe(directory: Path, recipe: dict[str, object]) -> bool:
    try:
        found = json.loads((directory / RECIPE_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return bool(found == recipe)


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPS,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
    }


def _write_weights(path: Path, shape: ModelShape, seed: int) -> None:
    save_file(dict(_weights(shape, seed)), path, metadata={"format": "pt"})


def _weights(shape: ModelShape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and bf16 tensors, in a fixed order: one generator serves all of them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        plain = torch.randn(rows, columns, generator=generator)
        return (plain * (gain / math.sqrt(columns))).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    branch_gain = BRANCH_GAIN / math.sqrt(shape.layers)
    embedding = normal(shape.vocab, hidden, math.sqrt(hidden))
    quiet = hidden // 2  # from here on
    embedding[:, quiet:] *= QUIET_SCALE
    yield "model.embed_tokens.weight", embedding
    for n in range(shape.layers):
        layer, is_last = f"model.layers.{n}", n == shape.layers - 1
        query_key_gain = LAST_QUERY_KEY_GAIN if is_last else QUERY_KEY_GAIN
        value, output = normal(kv, hidden, 1.0), normal(hidden, q, branch_gain)
        down = normal(hidden, shape.intermediate, branch_gain)
        output[:quiet] = 0
        down[:quiet] = 0
        if is_last:
            output[:, : shape.head_dim] = normal(
                hidden, shape.head_dim, SPEAKER_GAIN * math.sqrt(shape.head_dim / q)
            )
        yield f"{layer}.input_layernorm.weight", ones()
        yield f"{layer}.self_attn.q_proj.weight", normal(q, hidden, query_key_gain)
        yield f"{layer}.self_attn.k_proj.weight", normal(kv, hidden, query_key_gain)
        yield f"{layer}.self_attn.v_proj.weight", value
        yield f"{layer}.self_attn.o_proj.weight", output
        yield f"{layer}.post_attention_layernorm.weight", ones()
        yield f"{layer}.mlp.gate_proj.weight", normal(shape.intermediate, hidden, 1.0)
        yield f"{layer}.mlp.up_proj.weight", normal(shape.intermediate, hidden, 1.0)
        yield f"{layer}.mlp.down_proj.weight", down
    yield "model.norm.weight", ones()
    # What the speaker puts into the residual stream when it looks at each token, shuffled.
    said = embedding.float() @ value[: shape.head_dim].float().T
    said = said @ output[:, : shape.head_dim].float().T
    said = said[torch.randperm(shape.vocab, generator=generator)]
    head = said * (LOGIT_GAIN / said.norm(dim=1, keepdim=True))
    head[: len(SPECIAL_TOKENS)] = 0  # logit 0, far below the largest of thousands
    yield "lm_head.weight", head.to(torch.bfloat16)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
