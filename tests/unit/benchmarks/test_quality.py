# SPDX-License-Identifier: Apache-2.0
"""benchmarks/quality: the model, the methods of truncation, training, and the measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quality import codecs, data, picture, report
from benchmarks.quality.evaluate import Settings, interval
from benchmarks.quality.export import export, load
from benchmarks.quality.initial import initialize
from benchmarks.quality.measure import measure
from benchmarks.quality.methods import Method, Recompute, Truncation, Window, truncations
from benchmarks.quality.model import Llama, Shape, rotate, rotation
from benchmarks.quality.recall import lesson, stream
from benchmarks.quality.tokenizer import END_ID, VOCABULARY_MIN, Alphabet
from benchmarks.quality.train import Budget, Recipe, Trainer, train

WINDOW = 64
ALPHABET = Alphabet(VOCABULARY_MIN)


def tiny(layers: int, seed: int = 1) -> Llama:
    """About ten thousand parameters. Larger weights than usual, so that attention matters."""
    shape = Shape(
        vocabulary=VOCABULARY_MIN + 16,
        window=WINDOW,
        layers=layers,
        hidden=16,
        intermediate=24,
        heads=2,
        kv_heads=1,
        head_dim=8,
    )
    model = Llama(shape)
    initialize(model, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("proj.weight"):
                weight.normal_(std=0.5)
    return model.eval()


def random_tokens(model: Llama, sequences: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(model.shape.vocabulary, (sequences, length), generator=generator)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of a made-up language: common ones are short."""
    rng = np.random.default_rng(3)
    letters = np.array(list("abcdefghijklmnop"))
    words = ["".join(rng.choice(letters, 1 + n // 20)) for n in range(100)]
    lines = [" ".join(rng.choice(words, 9)) for _ in range(1_500)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


# The model


@torch.no_grad()
def test_incremental_forward_equals_the_whole() -> None:
    model = tiny(3)
    tokens = random_tokens(model, 2, 50)
    whole, _ = model.run(tokens)
    window = Window(model, Truncation(WINDOW, 16, Method.CA), tokens[:, :7])
    parts = [window.feed(tokens[:, a:b]) for a, b in ((7, 8), (8, 31), (31, 50))]
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 7:], rtol=1e-4, atol=1e-5)


def test_attention_with_gradients_equals_the_one_without() -> None:
    model = tiny(2)
    tokens = random_tokens(model, 2, 40)
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(model(tokens).detach(), expected, rtol=1e-4, atol=1e-5)


def test_rotations_add_up() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    once = rotate(x, rotation(torch.tensor([5, 700, -31]), 8))
    back = rotate(once, rotation(torch.tensor([-5, -700, 31]), 8))
    torch.testing.assert_close(back, x)
    assert not torch.allclose(once, x, atol=0.1)


@torch.no_grad()
def test_first_layer_begins_by_looking_at_the_token_before() -> None:
    shape = Shape(window=WINDOW, layers=1)
    model = Llama(shape)
    initialize(model, 0)
    layer, by = model.model.layers[0], rotation(torch.arange(WINDOW), shape.head_dim)
    x = layer.input_layernorm(model.model.embed_tokens(random_tokens(model, 1, WINDOW)))[0]
    query = rotate(layer.self_attn.q_proj(x)[:, : shape.head_dim], by)
    key = rotate(layer.self_attn.k_proj(x)[:, : shape.head_dim], by)
    scores = query @ key.T * shape.head_dim**-0.5
    future = torch.full((WINDOW, WINDOW), -torch.inf).triu(1)
    before = torch.softmax(scores + future, -1).diagonal(-1)
    assert float(before.min()) > 0.5


# The methods


def after(model: Llama, streams: torch.Tensor, overflows: int, **options: Any) -> Window:
    truncation = Truncation(WINDOW, options.pop("drop", 16), options.pop("method"), **options)
    ((_, window),) = truncations(model, streams, truncation, (overflows,))
    return window


def goes_on(window: Window, streams: torch.Tensor, overflows: int) -> torch.Tensor:
    drop = window.truncation.drop
    at = WINDOW + (overflows - 1) * drop
    return window.feed(streams[:, at : at + drop])


@pytest.mark.parametrize("overflows", [1, 5])
@torch.no_grad()
def test_with_one_layer_reuse_is_exact(overflows: int) -> None:
    """K and V of the first layer depend on a token and its position only."""
    model = tiny(1)
    streams = random_tokens(model, 2, WINDOW + overflows * 16)
    found = {}
    for method in Method:
        window = after(model, streams, overflows, method=method)
        found[method] = goes_on(window, streams, overflows)
    torch.testing.assert_close(found[Method.CA], found[Method.TT], rtol=1e-4, atol=1e-4)
    assert float((found[Method.NKVT] - found[Method.TT]).abs().max()) > 0.1


@torch.no_grad()
def test_deeper_layers_remember_the_cut() -> None:
    model = tiny(2)
    streams = random_tokens(model, 2, WINDOW + 16)
    reused = after(model, streams, 1, method=Method.CA).used
    recomputed = after(model, streams, 1, method=Method.TT).used
    torch.testing.assert_close(reused[0].k, recomputed[0].k, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reused[0].v, recomputed[0].v, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(reused[1].v, recomputed[1].v, atol=0.01)


@torch.no_grad()
def test_recomputing_is_what_the_generator_leaves_out() -> None:
    """truncations() begins TT at each overflow anew; Window.truncate() does the same."""
    model = tiny(2)
    streams = random_tokens(model, 2, WINDOW + 32)
    chain = Window(model, Truncation(WINDOW, 16, Method.TT), streams[:, :WINDOW])
    chain.truncate()
    goes_on(chain, streams, 1)
    chain.truncate()
    direct = after(model, streams, 2, method=Method.TT)
    torch.testing.assert_close(goes_on(chain, streams, 2), goes_on(direct, streams, 2))


@torch.no_grad()
def test_rotates_once_from_the_first_k() -> None:
    """Stored in bf16, K of the first layer stays within 2 units of TT's, after 15 overflows."""
    model = tiny(1)
    streams = random_tokens(model, 8, WINDOW + 15 * 4)
    options = {"drop": 4, "stored": torch.bfloat16}
    reused = after(model, streams, 15, method=Method.CA, **options).used[0].k.float()
    exact = after(model, streams, 15, method=Method.TT, drop=4).used[0].k
    pair = torch.stack(exact.chunk(2, -1)).norm(dim=0).repeat(1, 1, 1, 2)
    unit = 2.0 ** (torch.floor(torch.log2(pair)) - 7)
    assert float(((reused - exact) / unit).abs().max()) <= 2


@torch.no_grad()
def test_recomputes_the_first_and_the_last() -> None:
    model = tiny(2)
    streams = random_tokens(model, 2, WINDOW + 16)
    recomputed = after(model, streams, 1, method=Method.TT).used[1].v
    plain = after(model, streams, 1, method=Method.CA).used[1].v
    some = after(model, streams, 1, method=Method.CA, recompute=Recompute(first=5, last=3))
    v = some.used[1].v
    torch.testing.assert_close(v[:, :, :5], recomputed[:, :, :5], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v[:, :, 5:45], plain[:, :, 5:45])
    assert not torch.allclose(v[:, :, 45:], plain[:, :, 45:], atol=1e-3)
    every = after(model, streams, 1, method=Method.CA, recompute=Recompute(first=48)).used[1].v
    torch.testing.assert_close(every, recomputed, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_fork_leaves_its_origin_alone() -> None:
    model = tiny(2)
    tokens = random_tokens(model, 2, 60)
    window = Window(model, Truncation(WINDOW, 16, Method.CA), tokens[:, :40])
    expected = window.fork().feed(tokens[:, 40:])
    window.fork().feed(tokens[:, :20])
    torch.testing.assert_close(window.feed(tokens[:, 40:]), expected)


# Recall


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_lessons_have_the_right_answers(level: float) -> None:
    text = 1 + np.arange(256) % 99  # no end, no key, no value
    num_answers = 0
    for seed in range(20):
        one = lesson(np.random.default_rng(seed), text, ALPHABET, level)
        stated: dict[int, int] = {}
        for at, token in enumerate(one.tokens[:-1].tolist()):
            following = int(one.tokens[at + 1])
            assert not (one.noise[at] and one.answers[at])
            assert one.noise[at] or one.answers[at] or 0 < following < 100
            if token in ALPHABET.keys:
                assert bool(one.answers[at]) == (token in stated) == (one.tokens[at - 1] == END_ID)
                before = int(one.tokens[at - 1])
                value = following if one.answers[at] else before
                assert stated.setdefault(token, value) == value
                assert value in ALPHABET.values
                num_answers += bool(one.answers[at])
        is_text = (one.tokens > 0) & (one.tokens < 100)
        assert (one.tokens[is_text] == text[: is_text.sum()]).all()
    assert num_answers > 100


def test_streams_ask_for_what_is_there_once() -> None:
    rng = np.random.default_rng(0)
    one = stream(rng, np.zeros(2_048, np.int64), ALPHABET, slot=16, window=512)
    for start in range(0, len(one.tokens) - 512, 16):
        keys = [t for t in one.tokens[start : start + 512].tolist() if t in ALPHABET.keys]
        assert len(keys) == len(set(keys)) >= 31
    questions = one.questions(64, 320, rng).reshape(-1, 3)
    kept = one.tokens[64:320].tolist()
    assert len(questions) == 16
    for end, key, value in questions.tolist():
        assert end == END_ID
        assert kept[kept.index(key) - 1] == value


# Data, training, export


def test_what_is_held_out_is_not_trained_on(text_file: Path) -> None:
    text = text_file.read_text()
    train_text, held_out = data.split(text)
    assert train_text + held_out == text
    assert train_text.endswith("\n")
    assert 0.14 < len(held_out) / len(text) < 0.16
    tokenizer, corpus = data.prepare([text_file], VOCABULARY_MIN + 16)
    assert tokenizer.decode(corpus.train.tolist()) == train_text
    assert tokenizer.decode(corpus.held_out["words"].tolist()) == held_out
    with pytest.raises(ValueError, match="one long line"):
        data.split("no end")


def test_pieces_cover_the_text() -> None:
    starts = [int(data.take(np.arange(1_000), n, 100)[0]) for n in range(200)]
    assert min(starts) < 10
    assert max(starts) > 890
    assert max(np.diff(sorted(starts))) < 15
    with pytest.raises(ValueError, match="are needed"):
        data.take(np.arange(10), 0, 11)


def make_trainer(text_file: Path, layers: int = 1) -> Trainer:
    _, corpus = data.prepare([text_file], VOCABULARY_MIN + 16)
    return Trainer(tiny(layers).shape, corpus, Recipe(step_tokens=128), lower=False)


def test_resumed_training_is_the_same(text_file: Path, tmp_path: Path) -> None:
    budget, checkpoint = Budget(steps=12), tmp_path / "checkpoint.pt"
    whole = make_trainer(text_file)
    begin = whole.model.model.embed_tokens.weight.detach().clone()
    train(whole, budget, tmp_path / "whole.pt")

    def stop_after(ticks: int) -> Callable[[], float]:
        times = iter(range(ticks))

        def clock() -> float:
            for now in times:
                return float(now)
            raise KeyboardInterrupt

        return clock

    with pytest.raises(KeyboardInterrupt):
        train(make_trainer(text_file), budget, checkpoint, save_every_s=0, clock=stop_after(6))
    resumed = make_trainer(text_file)
    resumed.load(checkpoint)
    assert resumed.progress.step == 5
    train(resumed, budget, checkpoint)
    assert resumed.progress.step == whole.progress.step == 12
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    assert not torch.equal(begin, whole.model.model.embed_tokens.weight)


def test_transformers_computes_the_same(text_file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, _ = data.prepare([text_file], VOCABULARY_MIN + 16)
    model = tiny(2)
    export(model, tokenizer, tmp_path, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    tokens = random_tokens(model, 2, WINDOW)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(load(tmp_path)(tokens), model(tokens))
    names = transformers.AutoTokenizer.from_pretrained(tmp_path)
    keys, values = Alphabet(model.shape.vocabulary).keys, Alphabet(model.shape.vocabulary).values
    text = "aab ⟦key3⟧⟦value63⟧ b"
    assert names(text)["input_ids"] == tokenizer.encode(text).ids
    assert keys[3] in names(text)["input_ids"] and values[63] in names(text)["input_ids"]
    assert names.decode(names(text)["input_ids"], skip_special_tokens=True) == text


# The measurements


def test_interval_is_of_documents() -> None:
    found = interval(np.array([1.0, 2.0, 3.0, 2.0] * 25))
    assert found["value"] == 2.0
    assert 1.8 < found["low"] < 1.9
    assert 2.1 < found["high"] < 2.2


def test_measures_a_model_of_one_layer(text_file: Path, tmp_path: Path) -> None:
    """The whole command: with one layer CA is exact, and NKVT is not."""
    model = tiny(1)
    with torch.no_grad():  # so that what it says depends on what it saw
        model.model.embed_tokens.weight.mul_(20)
    tokenizer, corpus = data.prepare([text_file], VOCABULARY_MIN + 16)
    corpus.save(tmp_path)
    export(model, tokenizer, tmp_path, torch.float32)
    settings = Settings(
        overflows=(1, 3),
        documents=9,
        recall_documents=9,
        curve_documents=2,
        curve_tokens=(4,),
        stored=None,
    )
    result = measure(tmp_path, settings)
    assert len(result["cells"]) == 6
    assert model.num_parameters == result["model"]["parameters"]
    for cell in result["cells"]:
        assert cell["documents"] == 9
        assert cell["perplexity_ratio"]["CA"]["value"] == pytest.approx(1, abs=1e-4)
        assert abs(cell["perplexity_ratio"]["NKVT"]["value"] - 1) > 0.01
        assert cell["recall_points_lost"]["CA"]["value"] == 0
    assert {(p["first"], p["last"]) for p in result["curve"]} == {(0, 0), (4, 0), (0, 4)}
    assert max(line["k"][0] for line in result["layers"]) < 1e-4
    picture.draw(json.loads(json.dumps(result)), tmp_path / "out" / "quality.svg")
    assert (tmp_path / "out" / "quality.svg").stat().st_size > 1000
    tables = report.tables(result)
    assert "goal <= 1.005: reached" in tables and "recall, TT, smallest" in tables


# Codecs


@torch.no_grad()
def test_a_codec_changes_kv_a_little_and_a_coarse_one_much() -> None:
    """Each number comes back to its own place: any other would be far off."""
    model = tiny(2)
    window = Window(model, Truncation(WINDOW, 16, Method.TT), random_tokens(model, 3, 48))
    layers = [kv.to(torch.bfloat16).to(torch.float32) for kv in window.used]

    def off(name: str) -> float:
        changed = codecs.CHANGES[name](layers)
        pairs = list(zip(changed, layers, strict=True))
        assert all(a.k.shape == b.k.shape for a, b in pairs)
        return max(
            float((a - b).norm() / b.norm())
            for one, two in pairs
            for a, b in zip(one, two, strict=True)
        )

    assert off("exact") == 0
    assert 0 < off("int8") < 0.02
    assert 0 < off("fp8") < 0.06
    assert off("2 bits") > 0.2
