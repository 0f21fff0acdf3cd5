# SPDX-License-Identifier: Apache-2.0
"""One prompt to a vLLM whose scheduler and workers are processes of their own, as `vllm serve` has
them. Run as a program:

    python -m tests.vllm.other_process '{"prompt": [...], "arguments": {...}}'

Prints, as JSON, the tokens of a greedy answer and how many of the prompt's were cached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm.host import ENVIRONMENT

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0


def ask_other_process(prompt: list[int], arguments: dict[str, Any]) -> tuple[list[int], int]:
    """(tokens, cached tokens) of an engine that is started for it and ended.

    Args:
        arguments: of vllm.LLM.
    """
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "VLLM_PORT": "23456"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    what = json.dumps({"prompt": prompt, "arguments": arguments})
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.other_process", what],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return said["tokens"], said["cached"]


def main(what: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**what["arguments"])
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": what["prompt"]}, greedy, use_tqdm=False)
    found = {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
