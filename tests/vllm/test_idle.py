# SPDX-License-Identifier: Apache-2.0
"""A model, or a start, that the store cannot serve runs as without it, and the log says why."""

from __future__ import annotations

import copy
import errno
import fcntl
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector import connector as connector_module
from attnstore_vllm.connector.connector import AttnStoreConnector
from attnstore_vllm.connector.support import CPU_KV_TYPES, reason_of_layers, reason_to_idle
from attnstore_vllm.errors import MachineError
from attnstore_vllm.scheduler.reset_watch import ResetWatch
from tests.vllm.engine import Answer, Engine, EngineSpec, store_settings
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.refusing import FEW
from tests.vllm.serve_helpers import wait_until

TOKENS = random_tokens("idle", 600)
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
WIDE = replace(FULL, num_kv_heads=4)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=128
)
LOCAL = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, attention_chunk_size=128
)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
BLOCKS = 8


def groups(*specs: Any, size: int | None = None) -> KVCacheConfig:
    """A configuration of groups of two layers each, as one side sees it."""
    made = [KVCacheGroupSpec([f"g{g}l{i}" for i in range(2)], s) for g, s in enumerate(specs)]
    page = specs[0].page_size_bytes if specs else 0
    size = BLOCKS * page * 2 if size is None else size
    tensors = [
        KVCacheTensor(
            size=size, layers=["g0l0", "g0l1"], layer_stride=BLOCKS * page, block_stride=page
        )
    ]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=made)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", TINY)
    return EngineArgs(model=str(model), dtype="bfloat16").create_engine_config()


def test_a_plain_model_is_served(config: Any) -> None:
    assert reason_to_idle(config, groups(FULL)) is None
    assert reason_to_idle(config, groups(WINDOW, FULL)) is None


@pytest.fixture
def with_store(tmp_path: Path) -> Any:
    (tmp_path / "store").mkdir()
    transfer = KVTransferConfig(
        kv_connector="AttnStoreConnector", kv_role="kv_both",
        kv_connector_extra_config=store_settings(
            EngineSpec(store=tmp_path / "store", models=tmp_path)
        ),
    )  # fmt: skip
    model = make_model(tmp_path / "tiny", TINY)
    return EngineArgs(
        model=str(model), dtype="bfloat16", kv_transfer_config=transfer
    ).create_engine_config()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_vllm_without_a_field(with_store: Any, role: KVConnectorRole) -> None:
    """A later one may have lost it: what raises is a reason to be idle."""
    kv = groups(FULL)
    other = SimpleNamespace(
        num_blocks=kv.num_blocks,
        kv_cache_tensors=kv.kv_cache_tensors,
        kv_cache_groups=[SimpleNamespace(layer_names=["g0l0", "g0l1"])],
    )
    connector = AttnStoreConnector(with_store, role, other)
    assert connector.scheduler is None and connector.worker is None


def test_a_vllm_with_another_cache_manager(
    with_store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its table of blocks is elsewhere, so no reset could be seen."""
    kv = groups(FULL)
    connector = AttnStoreConnector(with_store, KVConnectorRole.SCHEDULER, kv)
    assert connector.scheduler is None  # no worker has said what its KV looks like
    closed = []

    class Unbound:
        def bind_kv_cache_manager(self, manager: Any) -> None:
            ResetWatch().bind(manager)

        def close(self) -> None:
            closed.append(self)

    connector.scheduler = Unbound()  # type: ignore[assignment]
    caplog.clear()
    connector.bind_kv_cache_manager(SimpleNamespace(block_pool=SimpleNamespace()))
    assert connector.scheduler is None and closed
    assert "AttnStore is idle" in caplog.text
    assert connector.build_connector_meta(None).plan.is_idle


def test_a_directory_that_cannot_be_locked_is_no_trait_of_the_model(
    with_store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS without a lock daemon: the start is refused, and says where."""

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(MachineError, match=r"nvme.path is .*store.*cannot be locked"):
        AttnStoreConnector(with_store, KVConnectorRole.SCHEDULER, groups(FULL))
    assert "idle" not in caplog.text


def test_a_fault_of_ours_is_not_told_as_the_models(
    with_store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def planted(*_: Any) -> None:
        raise OSError(errno.EMFILE, "planted")

    monkeypatch.setattr(connector_module, "build_scheduler", planted)
    connector = AttnStoreConnector(with_store, KVConnectorRole.SCHEDULER, groups(FULL))
    assert connector.scheduler is None
    assert "AttnStore is idle" in caplog.text and "it failed while it began: OSError" in caplog.text
    assert "this model cannot" not in caplog.text


MANAGER = "--disable-hybrid-kv-cache-manager"


@pytest.mark.parametrize(
    ("kv", "reason", "helps"),
    [
        (groups(), "it keeps no KV", False),
        (groups(LOCAL, LOCAL), "no group of its layers keeps KV of all tokens", False),
        (groups(FULL, replace(WINDOW, num_kv_heads=4)), "pages of its groups have", False),
        (groups(replace(FULL, non_causal=True)), "both directions", False),
        (groups(FULL, size=BLOCKS), "KV tensors have 8 bytes", False),
    ],
)  # fmt: skip
def test_reasons_of_groups(config: Any, kv: KVCacheConfig, reason: str, helps: bool) -> None:
    found = reason_to_idle(config, kv)
    assert found is not None and reason in found
    assert (MANAGER in found) is helps


@pytest.mark.parametrize(
    "spec", [MLA, replace(MLA, tokens_per_state=4), replace(FULL, page_size_padded=8192), WINDOW]
)
def test_specs_that_are_served(config: Any, spec: Any) -> None:
    assert reason_to_idle(config, groups(spec)) is None


def test_what_only_a_worker_sees() -> None:
    """vLLM shows the scheduler one layer's spec, and the workers all of them."""
    other = replace(WIDE, non_causal=True)
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"g0l0": FULL, "g0l1": other})
    assert reason_of_layers(groups(FULL), 0) is None
    assert "both directions" in str(reason_of_layers(groups(several, size=1), 0))


@pytest.mark.parametrize(
    ("section", "name", "value", "reason"),
    [
        *[("cache_config", "cache_dtype", kind, "--kv-cache-dtype") for kind in
          ("turboquant_k8v4", "int8_per_token_head", "fp8_per_token_head", "nvfp4")],
        ("cache_config", "calculate_kv_scales", True, "--calculate-kv-scales"),
        ("cache_config", "use_replayssm", True, "beside its block"),
        ("aux_output_config", "enable_return_routed_experts", True, "routed experts"),
        ("", "diffusion_config", object(), "diffusion"),
        ("", "engram_config", object(), "engram"),
    ],
)  # fmt: skip
def test_reasons_of_settings(config: Any, section: str, name: str, value: Any, reason: str) -> None:
    class Overlay:
        """vLLM's section with one setting of another value, whoever checks its values."""

        def __init__(self, below: Any, values: dict[str, Any]) -> None:
            self._below, self._values = below, values

        def __getattr__(self, asked: str) -> Any:
            values = self.__dict__["_values"]
            return values[asked] if asked in values else getattr(self.__dict__["_below"], asked)

    changed = (
        {name: value}
        if not section
        else {section: Overlay(getattr(config, section), {name: value})}
    )
    found = reason_to_idle(Overlay(config, changed), groups(FULL))
    assert found is not None and reason in found


def test_latents_want_prefix_caching(config: Any) -> None:
    """vLLM turns it off where its kernels do not read what was computed before."""
    served = copy.copy(config)
    served.model_config = SimpleNamespace(use_mla=True)
    assert reason_to_idle(served, groups(MLA)) is None
    served.cache_config = replace(config.cache_config, enable_prefix_caching=False)
    assert "prefix caching is off" in str(reason_to_idle(served, groups(MLA)))


@pytest.mark.parametrize("kind", CPU_KV_TYPES)
def test_types_that_are_served(config: Any, kind: str) -> None:
    served = copy.copy(config)
    served.cache_config = replace(config.cache_config, cache_dtype=kind)
    assert reason_to_idle(served, groups(FULL)) is None


def with_drafts(config: Any, **fields: Any) -> Any:
    """The configuration with drafts; `fields` are those of SpeculativeConfig that differ."""
    found: dict[str, Any] = {"parallel_drafting": False, "kv_cache_dtype": None, **fields}
    several = found.pop("modules", 1) > 1
    served = copy.copy(config)
    served.__dict__["speculative_config"] = SimpleNamespace(
        use_multi_module_mtp=lambda: several, **found
    )
    return served


@pytest.mark.parametrize(
    "method", ["ngram", "ngram_gpu", "suffix", "eagle", "eagle3", "mtp", "draft_model"]
)
def test_drafts_that_are_served(config: Any, method: str) -> None:
    assert reason_to_idle(with_drafts(config, method=method), groups(FULL)) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"method": "extract_hidden_states"}, "its drafts are made by 'extract_hidden_states'"),
        ({"method": "dflash"}, "its drafts are made by 'dflash'"),
        ({"method": "eagle", "parallel_drafting": True}, "in parallel"),
        ({"method": "eagle", "kv_cache_dtype": "nvfp4"}, "KV of type 'nvfp4'"),
    ],
)
def test_drafts_that_are_not(config: Any, fields: dict[str, Any], reason: str) -> None:
    assert reason in str(reason_to_idle(with_drafts(config, **fields), groups(FULL)))


@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
def test_drafts_with_several_groups(config: Any, method: str) -> None:
    served = with_drafts(config, method=method)
    assert reason_to_idle(served, groups(WINDOW, FULL)) is None
    assert reason_to_idle(served, groups(WINDOW)) is None


# ---- real starts -----------------------------------------------------------------------


def ask_again(engine: Engine) -> list[Answer]:
    first = engine.ask(TOKENS, max_tokens=4)
    assert engine.llm.reset_prefix_cache()
    return [first, engine.ask(TOKENS, max_tokens=4)]


def ask_again_and_count(engine: Engine) -> tuple[list[Answer], int]:
    return ask_again(engine), engine.store.residency.dram.num_slots


def serve(
    tmp_path: Path, connector: dict[str, Any], story: Any = ask_again, **vllm: Any
) -> tuple[Any, str]:
    """What a story returns, and the log. No region of ours must be left."""
    (tmp_path / "store").mkdir()
    spec = EngineSpec(store=tmp_path / "store", models=tmp_path, vllm=vllm)
    transfer = {
        "kv_connector": "AttnStoreConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": store_settings(spec),
        **connector,
    }  # fmt: skip
    before = set(Path("/dev/shm").glob("attnstore-*"))
    log = tmp_path / "engine.log"
    with EngineHost(replace(spec, store=None, transfer=transfer), log) as host:
        told = host.call(story)
        new = set(Path("/dev/shm").glob("attnstore-*")) - before
        # Another process's start leaves a name there for seconds; what is left of ours stays.
        wait_until(
            lambda: not new & set(Path("/dev/shm").glob("attnstore-*")), f"{new} is left", 60
        )
    return told, log.read_text()


IDLE = "AttnStore is idle, the server runs as without it"


def test_a_worker_that_fails_makes_both_sides_idle(tmp_path: Path) -> None:
    connector = {
        "kv_connector": "RefusingConnector",
        "kv_connector_module_path": "tests.vllm.refusing",
    }
    answers, log = serve(tmp_path, connector, max_model_len=1024)
    assert IDLE in log and "rank 0 cannot: it failed while it began: RuntimeError: planted" in log
    assert "this model cannot" not in log
    assert answers[0].content == answers[1].content
    assert answers[1].cached_tokens == 0


@pytest.mark.long
def test_a_worker_that_reaches_few_slots_has_a_store_of_these(tmp_path: Path) -> None:
    connector = {
        "kv_connector": "FewSlotsConnector",
        "kv_connector_module_path": "tests.vllm.refusing",
    }
    (answers, slots), _ = serve(tmp_path, connector, ask_again_and_count, max_model_len=1024)
    assert slots == FEW
    assert answers[0].content == answers[1].content
    assert answers[1].cached_tokens >= 512


def test_two_stores_in_one_engine(tmp_path: Path) -> None:
    """Both would answer what is asked for with `report`: vLLM ends the engine then."""
    (tmp_path / "other").mkdir()
    spec = EngineSpec(store=tmp_path / "store", models=tmp_path)
    settings = store_settings(spec)
    other = {**settings, "nvme": {**settings["nvme"], "path": str(tmp_path / "other")}}
    children = [
        {
            "kv_connector": "AttnStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": each,
        }
        for each in (settings, other)
    ]
    connector = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }
    answers, log = serve(tmp_path, connector, max_model_len=1024)
    assert log.count(IDLE) == 1 and "another AttnStore connector" in log
    assert answers[1].cached_tokens >= 512, "the first of them serves"


def test_windows_without_the_hybrid_manager(tmp_path: Path) -> None:
    """What the warning says helps."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_size=128,
        intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=2048, sliding_window=256, query_pre_attn_scalar=32,
        initializer_range=0.08,
    )  # fmt: skip
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path / "gemma")
    answers, log = serve(
        tmp_path,
        {},
        model=str(tmp_path / "gemma"),
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_hybrid_kv_cache_manager=True,
        max_model_len=1024,
    )
    assert IDLE not in log
    assert answers[1].cached_tokens >= 512
    assert answers[0].tokens == answers[1].tokens
