# SPDX-License-Identifier: Apache-2.0
"""The tiny tokenizer's promise: text that came from ids encodes to the same ids again."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from attnstore_lab.bench.conversations import read_conversations
from attnstore_lab.testing.tiny_model import SMALL, TINY, make_model
from attnstore_lab.testing.tiny_tokenizer import (
    END_ID,
    JOINER,
    SPECIAL_TOKENS,
    UNKNOWN,
    VOCAB_MIN,
    build_tokenizer,
    choose_pieces,
    shipped_pieces,
)
from benchmarks.sample import SAMPLE

VOCAB = 4_096
TOKENIZER = build_tokenizer(VOCAB)
ORDINARY_IDS = st.integers(len(SPECIAL_TOKENS), VOCAB - 1)
ANSWERS = st.lists(ORDINARY_IDS, min_size=1, max_size=40)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """The tokenizer as vLLM gets it: from the files, through AutoTokenizer."""
    directory = make_model(tmp_path_factory.mktemp("tiny") / "model", SMALL, weights=False)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return tokenizer


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The ids that a chat server computes for these messages."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@given(ids=st.lists(ORDINARY_IDS, max_size=200))
@example(ids=list(range(len(SPECIAL_TOKENS), VOCAB)))
@settings(deadline=None)
def test_decoded_ids_encode_to_the_same_ids(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)).ids == ids


@given(prompt=st.lists(ORDINARY_IDS, min_size=1, max_size=8), ids=ANSWERS)
@example(prompt=[END_ID], ids=list(range(len(SPECIAL_TOKENS), VOCAB)))
@settings(deadline=None)
def test_streamed_text_is_complete_after_each_token(prompt: list[int], ids: list[int]) -> None:
    """As vLLM streams it: nothing is held back, which would be lost when the answer ends."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    pieces = [stream.step(TOKENIZER, token_id) for token_id in ids]
    assert pieces == [TOKENIZER.id_to_token(token_id) for token_id in ids]


@given(text=st.text(max_size=200))
@settings(deadline=None)
def test_any_text_is_stable_after_one_round(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    once = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert TOKENIZER.encode(once).ids == ids


@given(questions=st.lists(st.text(max_size=60), min_size=2, max_size=4), data=st.data())
@settings(deadline=None, max_examples=50)
def test_each_turn_begins_with_the_turn_before_and_its_answer(
    loaded: PreTrainedTokenizerBase, questions: list[str], data: st.DataObject
) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    seen: list[int] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = render(loaded, messages)
        assert prompt[: len(seen)] == seen
        answer = data.draw(ANSWERS)
        seen = prompt + answer
        text = loaded.decode(answer, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})


def test_loaded_tokenizer_is_the_built_one(loaded: PreTrainedTokenizerBase) -> None:
    assert len(loaded) == VOCAB
    assert loaded.eos_token == "⟦end⟧"
    text = str(read_conversations(SAMPLE)[0].questions[0])
    assert loaded(text)["input_ids"] == TOKENIZER.encode(text).ids


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The the.", ["The", " the", "."]),
        ("the", [" the"]),
        ("\u6f22", [UNKNOWN]),
        ("⟦end⟧the", ["⟦end⟧", " the"]),
        ("", []),
    ],
)
def test_texts_at_the_borders(text: str, tokens: list[str]) -> None:
    assert TOKENIZER.encode(text).tokens == tokens


def test_accents_are_stripped_and_unknown_words_are_pieced_together() -> None:
    ids = TOKENIZER.encode(" z\u00f6rgle").ids
    assert ids == TOKENIZER.encode(" zorgle").ids
    assert len(ids) > 1
    assert TOKENIZER.decode(ids).replace(JOINER, "") == " zorgle"


@pytest.mark.parametrize("size", [VOCAB_MIN, TINY.vocab, VOCAB, 8_000])
def test_vocabulary_has_exactly_the_size_asked_for(size: int) -> None:
    assert build_tokenizer(size).get_vocab_size() == size


def test_vocabulary_below_the_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at least {VOCAB_MIN}"):
        build_tokenizer(VOCAB_MIN - 1)


def test_sample_conversations_take_few_tokens() -> None:
    texts = [str(q) for c in read_conversations(SAMPLE) for q in c.questions]
    tokens = sum(len(TOKENIZER.encode(text).ids) for text in texts)
    assert sum(map(len, texts)) / tokens > 3.8


def test_pieces_are_chosen_by_what_they_save() -> None:
    pieces = choose_pieces([" walking walking walking talking", "A talking"], 8)
    assert pieces[:2] == [" walking", " talking"]
    assert "\u00b7lking" in pieces
    assert len(shipped_pieces()) == len(set(shipped_pieces()))


def test_model_directory_is_reused_replaced_and_never_mistaken(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "m", TINY)
    written = (directory / "model.safetensors").read_bytes()
    made_at = (directory / "recipe.json").stat().st_mtime_ns
    assert (make_model(directory, TINY) / "recipe.json").stat().st_mtime_ns == made_at

    make_model(directory, TINY, seed=1)
    assert (directory / "model.safetensors").read_bytes() != written
    make_model(directory, TINY)
    assert (directory / "model.safetensors").read_bytes() == written

    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("the only copy")
    with pytest.raises(FileExistsError, match="foreign"):
        make_model(tmp_path / "foreign", TINY)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["foreign", "m"]


def test_model_without_weights_has_config_and_tokenizer_only(tmp_path: Path) -> None:
    names = {p.name for p in make_model(tmp_path / "m", TINY, weights=False).iterdir()}
    assert names == {"config.json", "recipe.json", "tokenizer.json", "tokenizer_config.json"}
