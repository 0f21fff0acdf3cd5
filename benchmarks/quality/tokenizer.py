# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer made from the training text, and the alphabet of the recall task.

Ids: the end token, the bytes and merges, then the keys, then the values. Keys and values are whole
tokens that ordinary text does not contain; they are not special, so a server's answers show them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "⟦end⟧"
END_ID = 0
NUM_KEYS = NUM_VALUES = 64
VOCABULARY_MIN = 1 + 256 + NUM_KEYS + NUM_VALUES
# Contents, one after the other: what a client drops from the beginning leaves the rest as it was.
CHAT_TEMPLATE = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The ids of keys and values in a vocabulary of this size."""

    vocabulary: int

    @property
    def keys(self) -> range:
        return range(self.vocabulary - NUM_VALUES - NUM_KEYS, self.vocabulary - NUM_VALUES)

    @property
    def values(self) -> range:
        return range(self.vocabulary - NUM_VALUES, self.vocabulary)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Make a tokenizer with exactly `vocabulary` ids.

    Raises: ValueError if vocabulary is below VOCABULARY_MIN, or the text has too few merges.
    """
    if vocabulary < VOCABULARY_MIN:
        raise ValueError(f"vocabulary is {vocabulary}; it must be at least {VOCABULARY_MIN}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - NUM_KEYS - NUM_VALUES,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    names = [f"⟦key{n}⟧" for n in range(NUM_KEYS)] + [f"⟦value{n}⟧" for n in range(NUM_VALUES)]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    if (found := tokenizer.get_vocab_size()) != vocabulary:
        raise ValueError(f"the text has merges for {found} ids only; vocabulary is {vocabulary}")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, window: int) -> None:
    """Write the files that AutoTokenizer reads; `window` is the model's, in tokens."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": window,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
