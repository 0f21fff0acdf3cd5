# SPDX-License-Identifier: Apache-2.0
"""Conversations in ShareGPT format with models of several KV cache groups: the share of prompt
tokens that the store saves, over that of a plain model.

    python -m benchmarks.group_replay [--dataset FILE] [--conversations 12] [--json FILE]

The conversations take turns. vLLM's own cache is emptied before each request, so all that is found
is the store's. Tokens are words, named by a digest: no tokenizer is needed. One real engine a
family, in a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnstore_lab.bench.conversations import Conversation, Piece, read_conversations
from benchmarks.family_parts.alone import measured
from benchmarks.sample import SAMPLE

NAMES = ("llama", "gemma3", "gpt_oss", "qwen3_next")
CONTEXT_TOKENS, ANSWER_TOKENS = 4_096, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dataset", type=Path, default=SAMPLE, help="a file in ShareGPT format")
    parser.add_argument("--conversations", type=int, default=12, help="at most so many")
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="NAME")
    parser.add_argument("--dram", default="256MiB")
    parser.add_argument("--nvme", default="2GiB")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    talks = [talk for talk in read_conversations(arguments.dataset) if len(talk.questions) > 1]
    talks = talks[: arguments.conversations]
    print(
        table(
            measured(
                arguments.only, replay, talks, arguments.dram, arguments.nvme, out=arguments.json
            )
        )
    )


def table(found: dict[str, dict[str, Any]]) -> str:
    plain = found.get("llama", {}).get("share")
    lines = ["family      requests   prompt tokens   found   share   over llama"]
    for name, row in found.items():
        over = f"{row['share'] / plain:.3f}" if plain else "-"
        lines.append(
            f"{name:11} {row['requests']:>8} {row['prompt_tokens']:>15} {row['found_tokens']:>7}"
            f"   {row['share']:.3f}   {over}"
        )
    return "\n".join(lines)


def tokens_of(piece: Piece) -> list[int]:
    """A token a word, the same for the same word."""
    if not isinstance(piece, str):
        return [16 + token % 984 for token in piece]
    return [16 + zlib.crc32(word.encode()) % 984 for word in piece.split()]


def replay(name: str, talks: Sequence[Conversation], dram: str, nvme: str) -> dict[str, Any]:
    """In a process of its own."""
    from attnstore_lab.testing.family_models import FAMILIES  # noqa: PLC0415
    from attnstore_lab.testing.tiny_model import TINY  # noqa: PLC0415
    from tests.vllm.engine import Engine, EngineSpec  # noqa: PLC0415

    histories = [tokens_of(talk.system or "") for talk in talks]
    found = prompts = requests = 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        work = Path(directory)
        engine = Engine(
            EngineSpec(
                models=work,
                shape=TINY,
                store=work / "store",
                blocks=320,
                dram=dram,
                nvme=nvme,
                vllm=FAMILIES[name].arguments(work / "families"),
            )
        )
        for turn in range(max(len(talk.questions) for talk in talks)):
            for talk, history in zip(talks, histories, strict=True):
                if turn >= len(talk.questions):
                    continue
                history.extend(tokens_of(talk.questions[turn]))
                answer = talk.answer(turn)
                wanted = 64 if answer is None else len(tokens_of(answer))
                length = max(1, min(ANSWER_TOKENS, wanted))
                if not history or len(history) + length >= CONTEXT_TOKENS:
                    continue
                engine.llm.reset_prefix_cache()
                said = engine.ask(history, max_tokens=length, logprobs=None)
                found, prompts = found + said.cached_tokens, prompts + len(history)
                requests += 1
                history.extend(said.tokens)
                engine.settle()
    return {
        "requests": requests,
        "prompt_tokens": prompts,
        "found_tokens": found,
        "share": found / prompts,
        "dram": dram,
        "nvme": nvme,
    }


if __name__ == "__main__":
    main()
