# SPDX-License-Identifier: Apache-2.0
"""docs/models.md, made of results/families.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

HEAD: Final = """\
# Models

Which models the store serves, and which run as without it. Written by
`python -m benchmarks.families --docs` from `results/families.json`: small random models on vLLM's
CPU build, each run with the store and without.

*Found*: tokens that were not computed of a prompt of 2,000 tokens asked again, of one that shares
1,500 with it, and of the next turn (2,085). The store's are those after vLLM's own cache was
emptied, beside what vLLM's own cache finds.

*Drift*: the largest difference of a log-probability from the run without the store, beside the
largest among runs without it.
"""
OUTCOMES: Final = {
    "served": "Served", "idle": "Idle: they run as without the store, and the log says why",
    "fails": "vLLM's CPU build does not run these, with or without the store",
    "dead": "Fail with the store only", "wrong": "Other answers with the store",
    "silent": "Idle without a word",
}  # fmt: skip
KINDS: Final = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "MLAAttentionSpec": "latent",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
}
STORED: Final = {
    "full": "K and V of each token", "window": "K and V of the last window before an end",
    "chunk": "K and V from the last chunk's start to an end", "state": "the state at an end",
    "latent": "one latent a token, once for all ranks",
}  # fmt: skip
BYTES: Final = {
    "full": "2 x KV heads x head size x bytes of an element, a layer",
    "window": "as full, of so many tokens", "chunk": "as full, of so many tokens",
    "state": "a state: all of vLLM's block of it, a layer",
    "latent": "(rank of the latent + rotary size) x bytes of an element, a layer",
}  # fmt: skip
SERVED_ELSEWHERE: Final = {
    "latent": "where vLLM caches prefixes: its CPU build does with AMX alone; tested by bytes "
    "(`tests/vllm/test_region_layouts.py`, `test_specs.py`)",
}
TRUNCATED: Final = {
    "full": "yes, if its K is rotated by a position times a constant",
    "window": "as full, the last window; no where all layers have windows",
    "chunk": "as full, the last chunk", "state": "no: a state is of all tokens before it",
    "latent": "no: its KV is not K and V of each head",
}  # fmt: skip
NEEDED: Final = {
    "full": "every token before its end", "window": "the last window before its end",
    "chunk": "its last chunk from its start", "state": "the state at exactly its end",
    "latent": "every token before its end",
}  # fmt: skip

BY_BYTES: Final = """\
## By bytes: vLLM's CPU build runs no engine with these

Of a few layers with the real models' sizes, vLLM's own functions make groups, tensors and views.
What is saved comes back to other blocks byte for byte, in every layer (`tests/vllm/test_specs.py`).
Where hits end, and what they need, is tried under vLLM's real scheduler and managers with a
scripted model (`tests/vllm/test_specs_scheduled.py`).

| family, or type of KV | groups as vLLM makes them | stored |
|---|---|---|
"""
BYTES_ROWS: Final[Mapping[tuple[str, ...], tuple[str, str, str]]] = {
    ("deepseek v4",): (
        "DeepSeek V4",
        "one block for all: latents of 4 and 128 tokens with an indexer's keys; windows; states of "
        "compressors",
        "all. Hits end at vLLM's own multiples (256 tokens). A slot has 17 blocks: `chunk_tokens` "
        "of 4096 fills them",
    ),
    ("deepseek v4.1",): (
        "DeepSeek V4.1",
        "latents of 1 and 2 tokens; windows that vLLM computes again; rings",
        "the latents. Hits end at vLLM's own multiples",
    ),
    ("deepseek v3.2, glm 5", "deepseek v3.2, flat"): (
        "DeepSeek V3.2, GLM 5",
        "latents and an indexer's keys in one group",
        "all",
    ),
    ("glm 5.3",): (
        "GLM 5.3",
        "latents and an indexer's keys of pools of tokens; rings of the open pool",
        "all but the rings. Hits end at vLLM's own multiples",
    ),
    ("kimi k3",): ("Kimi K3's kind", "states of delta attention; latents", "all"),
    ("minimax m3",): (
        "MiniMax M3",
        "full attention and an indexer's keys (latents) in one group",
        "all",
    ),
    ("nemotron-h", "nemotron-h, packed"): (
        "Nemotron-H: Mamba 2 beside attention",
        "states of all tokens before; full",
        "all, in the mode align",
    ),
    ("sliding mla",): ("MLA with a window", "windows; latents", "all"),
    ("compressed latents",): (
        "latents of 4 tokens each",
        "latents",
        "all. Hits end at vLLM's own multiples",
    ),
    ("r-swa",): ("R-SWA", "full, of which vLLM takes back generated tokens", "prompts"),
    ("sinks",): ("sinks in blocks", "full; vLLM 0.32 itself fails to make their manager", "all"),
    (
        "llama, nvfp4", "llama, turboquant", "llama, int8 per head", "llama, int4 per head",
        "llama, fp8 per head",
    ): ("nvfp4, TurboQuant; int8, int4 and fp8 per head", "full", "all, with the scales"),
}  # fmt: skip
"""By the models of tests/vllm/spec_models.py that each stands for."""
BY_BYTES_END: Final = """
HiSparse, cross attention and states in other modes than align are idle, and the log names the
property. Where a model has several groups each rank stores its own latents.

Where hits end at vLLM's own multiples, and beside windows, a model is idle under decode context
parallelism ([by which property](compatibility.md#parallelism)).
"""


def render(families: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page."""
    return "\n".join([HEAD, *_kinds(families), *_by_bytes(), *_outcomes(families)]) + "\n"


def _by_bytes() -> Iterator[str]:
    rows = "\n".join(f"| {' | '.join(row)} |" for row in BYTES_ROWS.values())
    yield f"{BY_BYTES}{rows}\n{BY_BYTES_END}"


def kinds_of(groups: list[str]) -> list[str]:
    """Kinds of group, each once, as "5 x 2 window, 2 full" has them."""
    names = [KINDS.get(group.split()[1], group.split()[1]) for group in groups]
    return list(dict.fromkeys(names))


def _kinds(families: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What each kind of group stores and needs; served, if a family that has it is served."""
    served = {
        k for r in families.values() if r["outcome"] == "served" for k in kinds_of(r["groups"])
    }
    yield "## What is stored\n"
    yield "| kind of group | served | stored | bytes | a hit needs | truncation moves it |"
    yield "|---|---|---|---|---|---|"
    for kind, stored in STORED.items():
        is_served = "yes" if kind in served else SERVED_ELSEWHERE.get(kind, "no")
        yield (
            f"| {kind} | {is_served} | {stored} | {BYTES[kind]} | {NEEDED[kind]} "
            f"| {TRUNCATED[kind]} |"
        )
    yield ""


def _outcomes(families: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for outcome, title in OUTCOMES.items():
        those = {name: r for name, r in families.items() if r["outcome"] == outcome}
        if not those:
            continue
        yield f"## {title}\n"
        if outcome == "served":
            yield "| family | groups | found | vLLM's own | drift | noise | tested |"
            yield "|---|---|---|---|---|---|---|"
            for r in those.values():
                yield (
                    f"| {r['stands_for']} | {_groups(r)} | {_counts(r['found'])} "
                    f"| {_counts(r['own'])} | {r['drift']:.1e} | {r['noise']:.1e} | {_tested(r)} |"
                )
        elif outcome == "fails":
            yield "| family | error |\n|---|---|"
            yield from (f"| {r['stands_for']} | {_plain(r['why'])} |" for r in those.values())
        else:
            yield "| family | groups | vLLM's own | why |\n|---|---|---|---|"
            for r in those.values():
                own = _counts(r["own"])
                yield f"| {r['stands_for']} | {_groups(r)} | {own} | {_plain(r['why'])} |"
        yield ""


def _groups(result: Mapping[str, Any]) -> str:
    """ "5 x 2 window, 2 full", by how many groups have so many layers of a kind."""
    counts = Counter(result["groups"])
    parts = []
    for group, count in counts.items():
        layers, kind = group.split()
        parts.append(f"{f'{count} x ' if count > 1 else ''}{layers} {KINDS.get(kind, kind)}")
    return ", ".join(parts) or "none"


def _counts(found: list[int]) -> str:
    return " / ".join(f"{count:,}" for count in found)


def _tested(result: Mapping[str, Any]) -> str:
    weights = "weights by transformers" if result["weights"] == "file" else "vLLM's dummy weights"
    return f"{result['dtype']}, {weights}"


def _plain(text: str) -> str:
    """Fit for a cell: no path of a machine, nothing that ends it."""
    return re.sub(r"(?<![\w.])/[\w./-]+/", "", text).replace("|", "\\|").replace("<", "&lt;")
