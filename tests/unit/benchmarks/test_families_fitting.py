# SPDX-License-Identifier: Apache-2.0
"""Small models of vLLM's registry: what single architectures need, and how an error is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.families import _error
from benchmarks.family_parts import registry
from benchmarks.family_parts.fitting import FITTED, Fit
from benchmarks.family_parts.registry import SMALL

HEAD = "(Process pid=1) ERROR 01-01 00:00:00 [registry.py:1] KeyError: 'x'\nTraceback:\n"
FRAME = '  File "/usr/lib/site-packages/vllm/layers/router.py", line 239, in route\n'


@pytest.mark.parametrize("name", sorted(FITTED))
def test_a_small_model_has_what_it_needs(name: str, tmp_path: Path) -> None:
    """Over SMALL, and over what transformers makes of it; and what vLLM refuses is not in it."""
    fit = FITTED[name]
    directory = registry.make_small(name, tmp_path / name)
    config = json.loads((directory / "config.json").read_text())
    assert {key: config[key] for key in fit.fields} == dict(fit.fields)
    assert config["architectures"] == [name]
    assert not set(fit.without) & config.keys()
    small = {key: value for key, value in SMALL.items() if key in config and key not in fit.fields}
    assert {key: config[key] for key in small} == small


def test_each_fit_is_of_an_architecture_that_the_sweep_tries() -> None:
    assert set(FITTED) <= set(registry.others())


def test_layers_are_as_many_as_the_model_has(tmp_path: Path) -> None:
    for name in FITTED:
        config = json.loads(
            (registry.make_small(name, tmp_path / name) / "config.json").read_text()
        )
        layers = config.get("num_hidden_layers", config.get("num_layers", config.get("n_layers")))
        for kinds in ("layer_types", "mlp_layer_types", "layers_block_type", "compress_ratios"):
            assert len(config.get(kinds) or range(layers)) == layers, (name, kinds)


def test_a_tokenizer_has_the_tokens_asked_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = registry.make_small("InklingForCausalLM", tmp_path)
    tokens = FITTED["InklingForCausalLM"].special_tokens
    vocabulary = transformers.AutoTokenizer.from_pretrained(directory).get_vocab()
    assert set(tokens) <= vocabulary.keys()
    assert max(vocabulary.values()) < SMALL["vocab_size"]


def test_options_reach_the_engine(tmp_path: Path) -> None:
    found = registry.arguments("Lfm2MoeForCausalLM", tmp_path)
    assert found["enable_prefix_caching"] is True
    assert found["skip_tokenizer_init"] is True
    assert registry.arguments("InklingForCausalLM", tmp_path)["skip_tokenizer_init"] is False


def test_others_are_left_as_they_were(tmp_path: Path) -> None:
    name = "GPT2LMHeadModel"
    assert name not in FITTED
    assert Fit() == Fit(fields={}, options={})
    assert set(registry.arguments(name, tmp_path)) == {
        "model", "dtype", "load_format", "max_model_len", "skip_tokenizer_init",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("KeyError: 'first'\nIndexError: index 8\n", "IndexError: index 8"),
        (
            f"{HEAD}{FRAME}    raise ValueError(\nValueError: no such kernel\n",
            "ValueError: no such kernel (vllm/layers/router.py, route)",
        ),
        (
            f"{HEAD}{FRAME}    assert scoring == 'softmax'\n           ^^^^\nAssertionError\n",
            "AssertionError: assert scoring == 'softmax' (vllm/layers/router.py, route)",
        ),
        (
            f"{HEAD}{FRAME}    return Config(\n"
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, blocks of 16 only [type=value_error, input_value=ArgsKwargs()]\n",
            "Value error, blocks of 16 only",
        ),
        ("RuntimeError: Engine core initialization failed.\n", "it ended without a word"),
        ("", "it ended without a word"),
    ],
)
def test_an_error_is_named_with_its_place(log: str, said: str) -> None:
    assert _error(log) == said


def test_a_long_error_keeps_its_place() -> None:
    said = _error(f"{FRAME}    raise ValueError(text)\nValueError: {'word ' * 100}\n")
    assert said.endswith(" (vllm/layers/router.py, route)")
    assert len(said) < 240
