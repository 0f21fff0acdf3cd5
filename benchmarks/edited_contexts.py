# SPDX-License-Identifier: Apache-2.0
"""Edited contexts of agents: how many of the tokens that an edit keeps are found again.

    python -m benchmarks.edited_contexts --trace claude_code_weka_sessions.jsonl.gz [--sessions N]

Prompts are those of recorded coding sessions, by their lengths and blocks; which words a block has
is drawn. Of a prompt in the middle of a session some runs are deleted, as tool results are, and a
note of a few new tokens stands where each was. What stands behind the first edit is looked up as
the server does:

    prefix       what is in its place, as any prefix cache
    cut          truncation: what follows it without a gap (index/moved.py: go_on)
    documents    truncation: {documents: true}; notes are computed (anywhere)

Nothing is computed or loaded: this says what is found, by the server's own index.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.summary import table
from attnstore_vllm.index.chunk import Chunk, ChunkName, InTier, State
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.index.prefix import Piece, PrefixIndex

ROOT = Path(__file__).resolve().parent.parent
BLOCK, CHUNK = 64, 256
GOAL = 0.8
EDITS, RUN_BLOCKS = (2, 6), (4, 40)
"""Runs that an edit deletes, and blocks of each."""
NOTE_TOKENS = (0, 24)
WORDS = 100_000
DOMAIN = root_key(b"edited contexts", None, b"")


def sessions(trace: Path, number: int) -> Iterator[list[int]]:
    """The blocks of a prompt in the middle of each session."""
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            if number <= 0:
                return
            session = json.loads(line)
            requests = session["requests"]
            found = requests[len(requests) // 2]["hash_rle"]
            blocks = [start + i for start, count in found for i in range(count)]
            if 300 <= len(blocks) <= 2_000:
                number -= 1
                yield blocks


def words(session: int, block: int) -> list[int]:
    random = Random(session * 1_000_003 + block)
    return [random.randrange(WORDS) for _ in range(BLOCK)]


def edited(session: int, blocks: list[int], random: Random) -> tuple[list[int], list[int], int]:
    """The prompt, that after the edit, and the tokens that it keeps behind the first deletion."""
    after, deleted = list(range(len(blocks))), 0
    notes: dict[int, int] = {}
    for _ in range(random.randint(*EDITS)):
        count = random.randint(*RUN_BLOCKS)
        at = random.randrange(40, len(after) - count - 8)
        notes[after[at + count]] = random.randint(*NOTE_TOKENS)
        del after[at : at + count]
        deleted += count
    before = [token for block in blocks for token in words(session, block)]
    tokens: list[int] = []
    first = min(notes)
    kept = sum(BLOCK for at in after if at >= first)
    for at in after:
        tokens += [WORDS + random.randrange(1000) for _ in range(notes.get(at, 0))]
        tokens += words(session, blocks[at])
    return before, tokens, kept


def stored(tokens: list[int]) -> tuple[PrefixIndex, MovedKv, list[Chunk]]:
    index = PrefixIndex(CHUNK)
    moved = MovedKv(index, CHUNK, 1 << 14, min_tokens=BLOCK, sinks=0, seed=11)
    keys = SequenceKeys(DOMAIN, tokens, CHUNK)
    chunks = []
    for number in range(len(tokens) // CHUNK):
        start = number * CHUNK
        name = ChunkName(
            keys.key(number), keys.key(number - 1) if number else DOMAIN, b"", bytes(32), start,
            CHUNK, keys.tokens(start, start + CHUNK),
        )  # fmt: skip
        chunk = Chunk(name, dram=InTier(State.READY))
        index.add(chunk)
        moved.note(name, DOMAIN, 0, is_exact=True)
        chunks.append(chunk)
    return index, moved, chunks


def found_by(kind: str, before: list[int], after: list[int]) -> list[Piece]:
    """What is found of the edited prompt."""
    index, moved, _chunks = stored(before)
    keys, stop = SequenceKeys(DOMAIN, after, CHUNK), len(after) - 1
    placed = index.match(keys, 0, stop)
    if kind == "cut":
        return moved.go_on(placed, keys, 0, stop)
    if kind == "documents":
        return moved.anywhere(placed, keys, 0, stop)
    return placed


def main() -> None:
    parser = argparse.ArgumentParser(description="What is found of edited contexts.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "edited_contexts.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    random = Random(9)
    shares: dict[str, list[float]] = {"prefix": [], "cut": [], "documents": []}
    prompts = list(sessions(args.trace, args.sessions))
    for number, blocks in enumerate(tqdm(prompts, unit="session")):
        before, after, kept = edited(number, blocks, random)
        first = next(n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        for kind, found in shares.items():
            pieces = found_by(kind, before, after)
            behind = sum(p.stop - max(p.start, first) for p in pieces if p.stop > first)
            found.append(behind / kept)
    results: list[dict[str, Any]] = [
        {
            "kind": kind, "mean": round(statistics.fmean(found), 3),
            "least": round(min(found), 3), "sessions": len(found),
        }
        for kind, found in shares.items()
    ]  # fmt: skip
    report = {"machine": machine(), "trace": args.trace.name, "goal": GOAL, "results": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    rows = [("", "kept tokens found behind the first edit, mean", "least", "goal")]
    rows += [
        (one["kind"], f"{one['mean']:.3f}", f"{one['least']:.3f}",
         str(GOAL) if one["kind"] == "documents" else "-")
        for one in results
    ]  # fmt: skip
    print(f"\n{len(prompts)} sessions, {EDITS[0]} to {EDITS[1]} runs deleted in each")
    print(table(rows))


if __name__ == "__main__":
    main()
