# SPDX-License-Identifier: Apache-2.0
"""Text as token ids: what the model is trained on, and what is held out of each file.

The end of each file is held out, from a line's beginning on; the tokenizer does not see it either.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.quality.tokenizer import train_tokenizer

Ids = NDArray[np.int64]
HELD_OUT_SHARE = 0.15
HELD_OUT_FILE = "held_out.npz"
CORPUS_FILE = "corpus.npz"
ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_TEXTS = tuple(
    ROOT.parent / "shared" / "data" / "corpus" / name
    for name in ("war_and_peace.txt", "wikitext2_raw_test.txt")
)
# Multiples of this, modulo 1, cover the unit interval evenly however many are taken.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Corpus:
    """Ids of the training text (all files, one after the other) and what is held out, by file."""

    train: Ids
    held_out: dict[str, Ids]

    def save(self, directory: Path) -> None:
        np.savez(directory / CORPUS_FILE, train=self.train.astype(np.uint16))
        held_out: dict[str, Any] = {n: i.astype(np.uint16) for n, i in self.held_out.items()}
        np.savez(directory / HELD_OUT_FILE, **held_out)

    @staticmethod
    def load(directory: Path) -> Corpus:
        with np.load(directory / CORPUS_FILE) as arrays:
            train = arrays["train"].astype(np.int64)
        return Corpus(train, load_held_out(directory))


def load_held_out(directory: Path) -> dict[str, Ids]:
    """The ids that `directory`'s model has not seen, by the name of the file they are from."""
    with np.load(directory / HELD_OUT_FILE) as arrays:
        return {name: arrays[name].astype(np.int64) for name in arrays.files}


def default_texts() -> list[Path]:
    """The texts used if none is named. Raises: FileNotFoundError if they are not there."""
    if missing := [path for path in DEFAULT_TEXTS if not path.exists()]:
        raise FileNotFoundError(f"{missing[0]} is not there: name a text with --text FILE")
    return list(DEFAULT_TEXTS)


def split(text: str, share: float = HELD_OUT_SHARE) -> tuple[str, str]:
    """Cut a text before the line that begins nearest after the first 1 - share of it."""
    at = text.find("\n", int(len(text) * (1 - share))) + 1
    if at in (0, len(text)):
        raise ValueError("the text ends in one long line: nothing can be held out")
    return text[:at], text[at:]


def prepare(paths: Sequence[Path], vocabulary: int) -> tuple[Tokenizer, Corpus]:
    """Read, split and tokenize texts in UTF-8. Cost: about 10 s for 5 MB."""
    halves = {path.stem: split(path.read_text(encoding="utf-8")) for path in paths}
    if len(halves) < len(paths):
        raise ValueError("two texts have the same name")
    tokenizer = train_tokenizer((train for train, _ in halves.values()), vocabulary)

    def ids(text: str) -> Ids:
        return np.asarray(tokenizer.encode(text).ids, dtype=np.int64)

    train = np.concatenate([ids(train) for train, _ in halves.values()])
    return tokenizer, Corpus(train, {name: ids(held) for name, (_, held) in halves.items()})


def fingerprint(paths: Sequence[Path], settings: dict[str, Any]) -> str:
    """What a model is made of: a directory made of something else must not be continued."""
    digests = [sha256(path.read_bytes()).hexdigest() for path in paths]
    return sha256(json.dumps([digests, settings], sort_keys=True).encode()).hexdigest()


def take(ids: Ids, index: int, length: int) -> Ids:
    """The `index`-th of infinitely many pieces of `length` ids, spread evenly over the text."""
    room = len(ids) - length
    if room < 0:
        raise ValueError(f"the text has {len(ids)} tokens; {length} are needed")
    start = int((index * GOLDEN) % 1.0 * (room + 1))
    return ids[start : start + length]
