# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose text can be encoded back to exactly the ids it came from.

The KV of generated tokens can be reused in the next turn only if the chat client's text encodes
to the same ids again. Usual tokenizers break that now and then; this one never does:

- A token is one *start* character (anything but a-z) and zero or more letters a-z after it:
  " the", "The", "7", ",", "\\n", "·ing". U+00B7, the joiner, starts a piece in mid-word.
- So text is cut before each start character, in one way only, and each cut piece that came from
  a token is that token: it is in the vocabulary, whole.
- A word that is not in the vocabulary becomes its longest known beginning and joined pieces:
  " flibber" -> " fli", "·bber". A start character that is not known becomes U+25A1, an ordinary
  token: special ones would be dropped from the text. (Not U+FFFD: detokenizers hold that back, as
  half a character.)
- Text that begins with a letter gets a space before it; accents are stripped.
- The three special tokens contain characters that no other token has, so no text of ordinary
  tokens spells one.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import chain, count, product
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

JOINER: Final = "\u00b7"
UNKNOWN: Final = "\u25a1"
SPECIAL_TOKENS: Final = ("⟦user⟧", "⟦assistant⟧", "⟦end⟧", "⟦system⟧")
END_ID: Final = SPECIAL_TOKENS.index("⟦end⟧")
VOCAB_MIN: Final = 512

_ASCII_STARTS = "".join(chr(c) for c in range(32, 127) if not "a" <= chr(c) <= "z")
# Quotes, dashes, bullet, degree, euro, pound, times, arrows, comparisons.
_TYPOGRAPHIC_STARTS = (
    "\u2018\u2019\u201c\u201d\u2013\u2014\u2022\u00b0\u20ac\u00a3\u00d7\u2192\u2190\u2264\u2265"
)
_STARTS = _ASCII_STARTS + "\n\t" + _TYPOGRAPHIC_STARTS + UNKNOWN + JOINER
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PIECE = "[^a-z][a-z]*"

# Append-only: a conversation's text is the beginning of the text of its continuation.
CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{{- '⟦' ~ message['role'] ~ '⟧' -}}{{- message['content'] -}}{{- '⟦end⟧' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '⟦assistant⟧' -}}{%- endif -%}"
)


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Make the tokenizer with exactly `vocab_size` ids; those of special tokens come first.

    The vocabulary is the single characters, then the shipped pieces, most useful first, then
    fillers (the joiner and letters) if vocab_size asks for more than there are pieces.
    Raises: ValueError if vocab_size is below VOCAB_MIN.
    """
    if vocab_size < VOCAB_MIN:
        raise ValueError(f"vocab_size is {vocab_size}; it must be at least {VOCAB_MIN}")
    names = chain(SPECIAL_TOKENS, _single_pieces(), shipped_pieces(), _fillers())
    vocab: dict[str, int] = {}
    while len(vocab) < vocab_size:
        vocab.setdefault(next(names), len(vocab))
    model = models.WordPiece(
        vocab,
        unk_token=UNKNOWN,
        continuing_subword_prefix=JOINER,
        max_input_chars_per_word=1_000,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(r"\A(?=[a-z])"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    return tokenizer


def write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """Write the files that AutoTokenizer reads; `max_length` is the model's, in tokens."""
    build_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": SPECIAL_TOKENS[END_ID],
        "pad_token": SPECIAL_TOKENS[END_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def shipped_pieces() -> list[str]:
    """Return the pieces chosen from the sample conversations, most useful first."""
    text = resources.files(__package__).joinpath("tiny_pieces.txt").read_text(encoding="utf-8")
    return [piece for piece in re.findall(_PIECE, text) if len(piece) > 1]


def choose_pieces(texts: Iterable[str], num_pieces: int) -> list[str]:
    """Choose the pieces that save most tokens in `texts`: words first, then parts of words.

    The result is in the order of what each piece saves. At most a quarter are parts of words;
    those are weighed by the number of different words that have them.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(p for p in re.findall(_PIECE, text) if len(p) > 1 and p[0] in _STARTS)
    words = Counter({word: n for word, n in words.items() if word[0] not in "\n\t" + UNKNOWN})
    parts: Counter[str] = Counter()
    for word in words:
        letters = word[1:]
        parts.update(word[: 1 + n] for n in range(1, min(4, len(letters))))
        spans = ((a, a + n) for n in range(2, 6) for a in range(1, len(letters) - n + 1))
        parts.update(JOINER + letters[a:b] for a, b in spans)
    saved_by_word = {word: n * len(word) for word, n in words.items()}
    saved_by_part = {p: n * (len(p) - 1) for p, n in parts.items() if p not in words}
    chosen_parts = sorted(saved_by_part, key=lambda p: (-saved_by_part[p], p))[: num_pieces // 4]
    saved = saved_by_word | {part: saved_by_part[part] for part in chosen_parts}
    return sorted(saved, key=lambda p: (-saved[p], p))[:num_pieces]


def _single_pieces() -> list[str]:
    return [*_STARTS, *(JOINER + letter for letter in _LETTERS)]


def _fillers() -> Iterator[str]:
    for length in count(2):
        for letters in product(_LETTERS, repeat=length):
            yield JOINER + "".join(letters)


def main() -> None:
    """Choose the pieces again and write them where `shipped_pieces` finds them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("conversations", type=Path, help="a file in ShareGPT format")
    parser.add_argument("--pieces", type=int, default=4_000)
    args = parser.parse_args()
    sessions = json.loads(args.conversations.read_text(encoding="utf-8"))
    texts = [turn["value"] for session in sessions for turn in session["conversations"]]
    pieces = choose_pieces(texts, args.pieces)
    lines, line = [], ""
    for piece in pieces:
        if len(line) + len(piece) > 100:
            lines.append(line)
            line = ""
        line += piece
    out = Path(__file__).with_name("tiny_pieces.txt")
    out.write_text("\n".join([*lines, line]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
