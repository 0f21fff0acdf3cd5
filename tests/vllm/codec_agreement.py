# SPDX-License-Identifier: Apache-2.0
"""Greedy answers behind KV that a codec has changed, by an engine without a server around it.

    python -m tests.vllm.codec_agreement MODEL RESULT.json [--documents N]

MODEL is what `benchmarks.quality train` left. The documents and the ways to ask are those of
`benchmarks.quality codecs-served`, but DRAM is emptied before KV is to come from NVMe: fast enough
for a machine that has other work. It goes into RESULT.json as `engine`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.quality.codecs import SERVED
from benchmarks.quality.data import Ids, load_held_out
from benchmarks.quality.evaluate import documents
from benchmarks.quality.served import ANSWER, NEW, Answer, Client
from benchmarks.quality.served_codecs import ask_all
from benchmarks.report import machine
from tests.vllm.engine import Engine, EngineSpec
from tests.vllm.host import EngineHost

WINDOW = 512


class InProcess:
    """What benchmarks.quality's client of a server does, without one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(self, prompt: Ids, salt: str, params: dict[str, Any], max_tokens: int) -> Answer:
        engine = self._engine
        if salt.endswith("near"):
            engine.evict_dram()
        how: dict[str, Any] = {
            "extra_args": {"kv_transfer_params": params},
            "max_tokens": max_tokens,
        }
        number = engine.submit(prompt.tolist(), salt=salt, **how)
        state = engine.side.requests[engine.request(number).request_id]
        (answer,) = engine.finish(number)
        engine.settle()
        return Answer(list(answer.tokens), dict(state.report()))

    def empty_hbm(self) -> None:
        self._engine.forget_hbm()


def measure(engine: Engine, pieces: list[Ids], stored: int) -> dict[str, Any]:
    client = cast("Client", InProcess(engine))
    return ask_all(client, pieces, stored, engine.spec.codec, lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.codec_agreement")
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--documents", type=int, default=24)
    args = parser.parse_args()
    stored = (WINDOW - ANSWER - NEW) // 128 * 128
    pieces = documents(load_held_out(args.model), stored + NEW, args.documents)
    found = []
    for codec in SERVED:
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model = {"model": str(args.model), "max_model_len": WINDOW}
            store = directory / "store"
            spec = EngineSpec(store=store, models=directory, codec=codec, vllm=model)
            with EngineHost(spec, directory / "log") as host:
                one = host.call(measure, pieces, stored)
        found.append({"measured_at": began, "machine": machine()} | one)
    result = json.loads(args.result.read_text(encoding="utf-8"))
    args.result.write_text(json.dumps(result | {"engine": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
