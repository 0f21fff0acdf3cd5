# SPDX-License-Identifier: Apache-2.0
"""Ways to start a server, and how much a machine is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from attnstore_lab.testing.tiny_model import SMALL, TINY, ModelShape

EAGER: Final = "eager"
LAYOUT: Final = "VLLM_KV_CACHE_LAYOUT"
GRAPHS: Final = "the CPU build has no CUDA graphs"
RUNNERS: Final = "the CPU build has one model runner"
BACKENDS: Final = "the CPU build has one attention backend"
LAYOUTS: Final = "the CPU build has one layout"


@dataclass(frozen=True, slots=True)
class Case:
    """A server that has to answer as it does without the store."""

    arguments: tuple[str, ...] = ()
    """Arguments of `vllm serve`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not_cpu: str = ""
    gpus: int = 1
    block_tokens: int | None = None
    """That the arguments ask for; None: what vLLM takes by itself."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of dram, beside its size."""
    reference: str = EAGER
    """The case whose answers, without the store, these should be."""


def _graphs(mode: str, *more: str) -> Case:
    return Case((f"-cc.cudagraph_mode={mode}", *more), why_not_cpu=GRAPHS)


def _backend(name: str, layout: str | None = None) -> Case:
    environment = {} if layout is None else {LAYOUT: layout}
    return Case(("--attention-backend", name), environment, why_not_cpu=BACKENDS)


def _layout(name: str) -> Case:
    return Case((), {LAYOUT: name}, why_not_cpu=LAYOUTS)


SWITCHED: Final = "nhd-then-hnd"
"""One directory, first for a server of one layout, then for one of the other."""
CASES: Final[Mapping[str, Case]] = {
    EAGER: Case(("--enforce-eager",)),
    "default": Case(),
    "piecewise": _graphs("PIECEWISE"),
    "full": _graphs("FULL"),
    "decode-graphs": _graphs("FULL_DECODE_ONLY", "-cc.mode=0"),
    "breakable": Case(
        ("-cc.mode=0", "-cc.cudagraph_mode=FULL_AND_PIECEWISE"),
        {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
        why_not_cpu=GRAPHS,
    ),
    "runner-v1": Case((), {"VLLM_USE_V2_MODEL_RUNNER": "0"}, why_not_cpu=RUNNERS),
    "runner-v2": Case((), {"VLLM_USE_V2_MODEL_RUNNER": "1"}, why_not_cpu=RUNNERS),
    "no-async": Case(("--no-async-scheduling",), why_not_cpu="the CPU build is synchronous always"),
    "flash-attn": _backend("FLASH_ATTN"),
    "flashinfer": _backend("FLASHINFER"),
    "triton": _backend("TRITON_ATTN"),
    "flex": _backend("FLEX_ATTENTION"),
    "nhd": _layout("NHD"),
    "hnd": _layout("HND"),
    "blocks-outermost": _layout("BLHNC"),
    "heads-outermost": _backend("TRITON_ATTN", "LHBNC"),
    SWITCHED: Case(("--enforce-eager",), why_not_cpu=LAYOUTS),
    "fp8": Case(("--enforce-eager", "--kv-cache-dtype", "fp8"), reference="fp8"),
    "fp8-graphs": Case(("--kv-cache-dtype", "fp8"), reference="fp8"),
    "block-64": Case(("--enforce-eager", "--block-size", "64"), block_tokens=64),
    "encoded": Case(settings={"codec": "lossless"}),
    "tp-2": Case(("--tensor-parallel-size", "2"), gpus=2),
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much a machine is asked. Tokens, unless it says otherwise."""

    shape: ModelShape
    """The model whose answers are compared: they depend on single tokens far back."""
    block: int
    model_len: int
    hbm: int
    """Too little for the crowd, so that vLLM preempts."""
    asked: tuple[int, int, int]
    """Prompts that are asked one after the other: how many, the shortest, the longest."""
    crowd: tuple[int, int, int]
    """Prompts that come at once; with their answers they need more than HBM has."""
    answer: int
    crowd_answer: int
    dram: str
    nvme: str
    """2.5 times DRAM at least: a smaller one loses what is new beside a busy disk."""

    timed: ModelShape
    """The model that is timed; its weights are dummies."""
    hits: tuple[int, ...]
    """Lengths of histories."""
    new: tuple[int, ...]
    """Tokens behind them that are computed."""
    pairs: int
    """Hits of each kind."""
    rounds: int
    decoders: int
    """Requests that generate meanwhile."""
    throughput_prompt: int


LLAMA_8B: Final = ModelShape(
    layers=32,
    hidden=4_096,
    intermediate=14_336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_position=36_864,
)
LLAMA_1B: Final = ModelShape(
    layers=16,
    hidden=2_048,
    intermediate=8_192,
    heads=32,
    kv_heads=8,
    head_dim=64,
    max_position=36_864,
)
ON_GPU: Final = Size(
    shape=ModelShape(
        layers=8, hidden=1_024, intermediate=2_048, heads=8, kv_heads=4, head_dim=128,
        max_position=8_192,
    ),
    block=16, model_len=8_192, hbm=12_288, asked=(16, 500, 6_000), crowd=(24, 1_800, 2_040),
    answer=32, crowd_answer=512, dram="4GiB", nvme="10GiB",
    timed=LLAMA_8B, hits=(2_048, 8_192, 32_768), new=(1, 2, 16, 128, 1_024), pairs=8, rounds=5,
    decoders=8,
    throughput_prompt=2_000,
)  # fmt: skip
ON_CPU: Final = Size(
    shape=TINY,
    block=128, model_len=2_048, hbm=3_072, asked=(6, 400, 1_500), crowd=(12, 480, 510),
    answer=24, crowd_answer=128, dram="64MiB", nvme="256MiB",
    timed=SMALL, hits=(512, 1_024), new=(1, 2, 16, 128, 1_024), pairs=2, rounds=2, decoders=1,
    throughput_prompt=500,
)  # fmt: skip
