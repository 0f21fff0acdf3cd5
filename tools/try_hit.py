# SPDX-License-Identifier: Apache-2.0
"""One hit of 1,024 tokens with this Python's vLLM: from HBM, then from the store, bit-equal."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
LENGTH = 1025


def main() -> int:
    os.environ.update(SETTINGS)
    import vllm  # noqa: PLC0415
    from vllm import LLM, SamplingParams  # noqa: PLC0415
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    from attnstore_lab.testing.tiny_model import TINY, make_model  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "store").mkdir()
        transfer = KVTransferConfig(
            kv_connector="AttnStoreConnector",
            kv_connector_module_path="attnstore_vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "dram": "64MiB",
                "compute_if_sooner": False,
                "nvme": {"path": str(directory / "store"), "capacity": "256MiB"},
            },
        )
        llm = LLM(
            model=str(make_model(directory / "model", TINY)), dtype="bfloat16",
            max_model_len=2048, enforce_eager=True, num_gpu_blocks_override=96,
            kv_transfer_config=transfer,
        )  # fmt: skip
        tokens = [Random(3).randrange(10, 900) for _ in range(LENGTH)]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)

        def ask() -> tuple[int, Any]:
            (found,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
            said = found.outputs[0]
            probabilities = [sorted((t, p.logprob) for t, p in at.items()) for at in said.logprobs]
            return found.num_cached_tokens, (list(said.token_ids), probabilities)

        ask()
        in_hbm, wanted = ask()
        assert llm.reset_prefix_cache()
        stored, got = ask()
    works = in_hbm == stored == LENGTH - 1 and got == wanted
    print(
        f"vLLM {vllm.__version__}: {in_hbm} tokens in HBM, {stored} from the store, "
        f"{'bit-equal' if got == wanted else 'answers differ'}: {'works' if works else 'FAILS'}"
    )
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
