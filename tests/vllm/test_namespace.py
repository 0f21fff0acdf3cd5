# SPDX-License-Identifier: Apache-2.0
"""What KV depends on is in the namespace; what it does not depend on keeps a store warm."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

vllm = pytest.importorskip("vllm")
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from attnstore_lab.testing.tiny_model import TINY, make_model  # noqa: E402
from attnstore_vllm.connector.worker import Worker  # noqa: E402
from attnstore_vllm.errors import UnsupportedError  # noqa: E402
from attnstore_vllm.identity.left_out import FIELDS, SECTIONS, VARIABLES  # noqa: E402
from attnstore_vllm.identity.namespace import facts_of  # noqa: E402
from attnstore_vllm.identity.rank import KvFacts, RankDescription  # noqa: E402
from attnstore_vllm.identity.vllm_settings import (  # noqa: E402
    _plain,
    environment,
    names_left_out,
    settings_of,
)
from attnstore_vllm.preflight import TESTED_VLLM  # noqa: E402
from attnstore_vllm.transfer.geometry import Geometry  # noqa: E402
from attnstore_vllm.transfer.pool import SharedPool  # noqa: E402
from tests.vllm.draft_models import make_eagle_head  # noqa: E402

KNOWN = Path(__file__).parent / "known_settings.txt"
GEOMETRY = Geometry.uniform(
    num_ranks=1, num_layers=3, block_tokens=16, page_bytes=4096, chunk_tokens=256
)


# ---- layouts ---------------------------------------------------------------------------


def _views(layout: KVCacheLayout, num_blocks: int) -> list[torch.Tensor]:
    """As vLLM cuts its memory: 3 layers, 2 heads of 32 dims, blocks of 16 tokens, bf16."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    page, layers = spec.page_size_bytes, GEOMETRY.num_layers
    compact = layout.is_layer_compact
    head = page // 2
    layer_stride = {True: num_blocks * page, False: page}[compact]
    block_stride = {True: page, False: layers * page}[compact]
    if layout is KVCacheLayout.LHBNC:
        block_stride = head
    if layout is KVCacheLayout.BHLNC:
        layer_stride = head
    tensor = KVCacheTensor(
        size=layers * num_blocks * page,
        layers=[f"l{i}" for i in range(layers)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    raw = torch.zeros(layers * num_blocks * page, dtype=torch.int8)
    return create_kv_cache_views(raw, spec, num_blocks, layout, tensor)


def _said_of(views: list[torch.Tensor], num_blocks: int, name: str, layout: str = "") -> KvFacts:
    """What a worker tells of these tensors, through a real pool."""
    pool = SharedPool(name, 2, GEOMETRY.slot_bytes, num_ranks=1, member=0)
    names = [f"l{i}" for i in range(GEOMETRY.num_layers)]
    worker = Worker(pool, 0, GEOMETRY, num_blocks, write_buffer_bytes=lambda _: 0)
    try:
        worker.register_kv_caches(dict(zip(names, views, strict=True)), "kernel", layout)
        found = pool.description(0)
        assert found is not None
        return RankDescription.of_json(found).kv
    finally:
        pool._path.unlink(missing_ok=True)
        worker.close()


def test_layouts_are_told_apart_without_their_names(tmp_path: Path) -> None:
    said = {
        layout: _said_of(_views(layout, 8), 8, f"attnstore-layout-{tmp_path.name}-{layout.name}")
        for layout in KVCacheLayout
    }
    assert len(set(said.values())) == len(KVCacheLayout), said


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_more_blocks_are_the_same_layout(layout: KVCacheLayout, tmp_path: Path) -> None:
    name = f"attnstore-blocks-{tmp_path.name}"
    few = _said_of(_views(layout, 8), 8, name, layout.name)
    assert few == _said_of(_views(layout, 24), 24, name, layout.name)
    assert few != _said_of(_views(layout, 8), 8, name, "another name")


def test_a_page_of_one_layout_is_wrong_under_another() -> None:
    """Why it matters: the bytes of one block, as a page is copied, differ."""
    pages = {}
    for layout in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC):
        view = _views(layout, 8)[0]
        view[1] = torch.arange(view[1].numel()).reshape(view[1].shape).to(view.dtype)
        order = sorted(range(3), key=lambda axis: -view[1].stride(axis))
        pages[layout] = view[1].permute(order).flatten()
    nhd, hnd = pages.values()
    assert (nhd != hnd).float().mean() > 0.9


# ---- settings --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


def _facts(model: Path, **settings: Any) -> str:
    config = EngineArgs(model=str(model), dtype="bfloat16", **settings).create_engine_config()
    kv = KvFacts("cpu", "torch.bfloat16", (2, 16, 64), 4096, (0, 1, 2), (1, 2, 3), "", "", ())
    return json.dumps(facts_of(config, GEOMETRY, [kv], "0.32.0"), sort_keys=True)


SAME: list[dict[str, Any]] = [
    {"max_model_len": 512},
    {"max_num_seqs": 3, "max_num_batched_tokens": 4096},
    {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 77},
    {"served_model_name": "another", "seed": 7},
    {"enable_prefix_caching": False, "disable_log_stats": True},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                            "prompt_lookup_max": 4}},
    {"kv_transfer_config": {"kv_connector": "AttnStoreConnector", "kv_role": "kv_both",
                            "kv_connector_extra_config": {"dram": "1GiB"}}},
]  # fmt: skip
OTHER: list[dict[str, Any]] = [
    {"block_size": 64},
    {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
    {"enable_lora": True},
    {"compilation_config": {"mode": 0, "custom_ops": ["all"]}},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"disable_sliding_window": True},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2},
]


@pytest.mark.parametrize("settings", SAME, ids=lambda settings: next(iter(settings)))
def test_settings_that_keep_a_store_warm(model: Path, settings: dict[str, Any]) -> None:
    assert _facts(model, **settings) == _facts(model)


@pytest.mark.parametrize("settings", OTHER, ids=lambda settings: next(iter(settings)))
def test_settings_that_make_other_kv(model: Path, settings: dict[str, Any]) -> None:
    assert _facts(model, **settings) != _facts(model)


# ---- drafts with KV of their own -------------------------------------------------------


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle_head(tmp_path_factory.mktemp("drafts") / "head")


def _with_head(model: Path, head: Path, **fields: Any) -> str:
    drafts = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2, **fields}
    return _facts(model, speculative_config=drafts)


def test_drafts_with_kv_are_in(model: Path, head: Path) -> None:
    assert _with_head(model, head) != _facts(model)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_speculative_tokens": 3},
        {"draft_sample_method": "probabilistic"},
        {"disable_eagle_block_drop": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_drafts_that_keep_a_store_warm(model: Path, head: Path, fields: dict[str, Any]) -> None:
    assert _with_head(model, head, **fields) == _with_head(model, head)


def test_drafts_from_another_place(model: Path, head: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(head, tmp_path / "copied")
    assert _with_head(model, copied) == _with_head(model, head)
    (copied / "code.py").write_text("# a model may bring its own")
    assert _with_head(model, copied) != _with_head(model, head)


@pytest.mark.parametrize(
    "fields", [{"kv_cache_dtype": "fp8_e5m2"}, {"draft_load_config": {"load_format": "pt"}}],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_drafts_that_make_other_kv(model: Path, head: Path, fields: dict[str, Any]) -> None:
    assert _with_head(model, head, **fields) != _with_head(model, head)


def test_the_drafts_own_configuration(model: Path, head: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(head, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert _with_head(model, changed) != _with_head(model, head)


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_what_the_processor_does_to_media(model: Path, name: str) -> None:
    before = _facts(model)
    file = model / name
    try:
        file.write_text('{"n_fft": 400}')
        first = _facts(model)
        file.write_text('{"n_fft": 512}')
        second = _facts(model)
    finally:
        file.unlink()
    assert len({before, first, second}) == 3
    assert _facts(model) == before


def test_a_variable_that_changes_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _facts(model)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert _facts(model) != before
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert _facts(model) == before


def test_what_cannot_be_told_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"ModelConfig\.later is a object"):
        _plain(object(), "ModelConfig.later")


def test_a_field_of_a_later_version_is_in(model: Path) -> None:
    config = EngineArgs(model=str(model), dtype="bfloat16").create_engine_config()

    @dataclasses.dataclass
    class LaterConfig:
        new: int = 1

    before = json.dumps(settings_of(config))
    config.diffusion_config = LaterConfig()
    assert json.dumps(settings_of(config)) != before


# ---- what a person has looked at ---------------------------------------------------------


def _settings_of_vllm() -> Iterator[str]:
    """`Class.field` of every configuration class that vLLM has, used here or not."""
    package = importlib.import_module("vllm.config")
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"vllm.config.{found.name}")
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                fields = getattr(value, "__dataclass_fields__", {})
                yield from (f"{name}.{field}" for field in fields)


def _seen() -> set[str]:
    from vllm import envs

    return set(_settings_of_vllm()) | set(envs.environment_variables)


ONLY_TESTED = pytest.mark.skipif(
    vllm.__version__.split("+")[0] != TESTED_VLLM[-1],
    reason="the lists are of the newest tested version",
)


@ONLY_TESTED
def test_somebody_has_decided_on_every_setting() -> None:
    """A new setting is in the namespace until somebody decides; then it goes into the file.

    Write it anew with `python -m tests.vllm.test_namespace`, when you have decided.
    """
    known, seen = set(KNOWN.read_text().split()), _seen()
    assert seen - known == set(), "vLLM has new settings: are they to stay in the namespace?"
    assert known - seen == set(), "vLLM has lost settings: take them out of the list"


@ONLY_TESTED
def test_the_list_of_what_is_left_out_names_what_there_is() -> None:
    seen = _seen()
    listed = set(SECTIONS) | names_left_out(VARIABLES)
    for section, reasons in FIELDS.items():
        listed |= {f"{section}.{name}" for name in names_left_out(reasons)}
    assert listed - seen == set()


def test_no_setting_has_two_reasons() -> None:
    for reasons in (*FIELDS.values(), VARIABLES):
        names = [name for words in reasons.values() for name in words.split()]
        assert len(names) == len(set(names))


def test_the_environment_is_plain_data() -> None:
    assert json.loads(json.dumps(environment())) == environment()


if __name__ == "__main__":
    KNOWN.write_text("\n".join(sorted(_seen())) + "\n")
