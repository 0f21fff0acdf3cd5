# SPDX-License-Identifier: Apache-2.0
"""Faults that once served wrong KV, each with its mend taken out: does the audit see them?

Each case shows first, with the audit off, that wrong KV is served: the answer differs by more than
rounding from that of a tenant who has nothing stored. docs/audit.md has the table.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attnstore_lab.testing.network_stores import NetworkStore, missing
from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.types import Event
from benchmarks.rounding import bound, drift
from tests.vllm import attacks, mends
from tests.vllm.attacks import Seen
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Answer
from tests.vllm.host import EngineHost
from tests.vllm.test_lora import LORA
from tests.vllm.test_namespace_starts import LONG, hears

SETTINGS = {
    "audit": {"rate": 1, "tokens": 1_000_000, "stop_after": 1000, "keep": "off"},
    "truncation": {"share": "everyone"},
}
AUDIT, TRIAL, NOT = "audit", "trial of a start", "not seen"
PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
Start = Callable[..., EngineHost]

ROWS = {
    "replaced behind": ("an adapter's files are replaced after it was loaded", AUDIT),
    "thrown out": ("an adapter comes back with other files", AUDIT),
    "name of two": ("vLLM's own cache has an old adapter's KV under a new one's name", AUDIT),
    "updated": ("weights are updated, and only vLLM's prefix cache is reset", AUDIT),
    "asleep at once": ("vLLM sleeps before an answer's end is copied", AUDIT),
    "updated first": ("weights are updated before the first request", TRIAL),
    "weights": ("weight files of the same size and time", TRIAL),
    "one bit": ("the same, and one bit differs", TRIAL),
    "tables": ("`--max-model-len` chooses another rotary table (LongRoPE)", TRIAL),
    "kernels": ("another machine's kernels order the bytes otherwise", TRIAL),
    "code": ("the code of the model's class changes", TRIAL),
    "uuid": ("a client's `uuid` names another sound", AUDIT),
    "uuid, alike": ("the same, and the two sounds are much alike", AUDIT),
    "encoder": ("vLLM's encoder keeps a sound as old weights heard it", AUDIT),
    "processor": ("the processor of sounds is set otherwise", NOT),
    "counter": ("vLLM names sounds by a counter, which begins anew", TRIAL),
    "stranger": ("a stranger writes to the shared tier", TRIAL),
    "turned twice": ("moved KV is moved once more", NOT),
}
"""By case: the fault, and what sees it, as docs/audit.md says."""


def check(case: str, seen: Seen, host: EngineHost) -> None:
    """The fault is real, and is seen by what the table says."""
    by, limit = ROWS[case][1], bound([])

    def is_right(answer: Answer) -> bool:
        return drift(answer, seen.computed) <= limit

    assert seen.served.cached_tokens > 0 and not is_right(seen.served), "it serves no wrong KV"
    assert seen.computed.cached_tokens == seen.audited.cached_tokens == 0
    assert is_right(seen.audited)
    refused = "serves nothing of what it found" in host.log_text()
    assert refused == (by == TRIAL)
    if by == NOT:
        assert set(seen.outcomes) == {Event.AGREED}
    else:
        assert seen.outcomes[Event.DIFFERED] > 0


@pytest.fixture(scope="module")
def start(start_engine: StartEngine) -> Start:
    return partial(start_engine, settings=SETTINGS)


# ---- in a running server --------------------------------------------------------------------

LIVE = {
    "replaced behind": attacks.replaced_behind,
    "thrown out": attacks.thrown_out,
    "name of two": attacks.name_of_two,
    "asleep at once": attacks.asleep_at_once,
    "updated": attacks.updated,  # the last: other weights are in memory then
}


@pytest.fixture(scope="module")
def engine(start: Start) -> EngineHost:
    return start(vllm=LORA)


@pytest.mark.parametrize("case", LIVE)
def test_in_a_running_server(engine: EngineHost, case: str, tmp_path: Path) -> None:
    check(case, engine.call(LIVE[case], tmp_path), engine)


# ---- over a restart -------------------------------------------------------------------------


@pytest.mark.long
def test_weights_before_the_first_request(start: Start, tmp_path: Path) -> None:
    given: dict[str, Any] = {"store": tmp_path / "store", "before": mends.never_look}
    start(**given).call(attacks.train_and_leave, "first")
    again = start(**given)
    check("updated first", again.call(attacks.find, "first"), again)


def test_weights_of_one_size_and_time(start: Start, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TINY)
    other = make_model(tmp_path / "other", TINY, seed=1) / "model.safetensors"
    given: dict[str, Any] = {
        "store": tmp_path / "store", "vllm": {"model": str(model)},
        "before": mends.weights_by_size_and_time,
    }  # fmt: skip
    start(**given).call(attacks.leave, "weights")
    before = (model / "model.safetensors").stat()
    shutil.copyfile(other, model / "model.safetensors")
    os.utime(model / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    again = start(**given)
    check("weights", again.call(attacks.find, "weights"), again)


@pytest.mark.long
def test_one_bit_of_one_weight(start: Start, tmp_path: Path) -> None:
    """The usual bound takes it for rounding; a learned one does not."""
    model = make_model(tmp_path / "model", TINY)
    given: dict[str, Any] = {
        "store": tmp_path / "store", "vllm": {"model": str(model)},
        "before": mends.weights_by_size_and_time,
    }  # fmt: skip
    one = start(**given)
    one.call(attacks.run_a_while)
    at = one.call(attacks.leave_and_look_for_a_bit, "bit")
    attacks.flip_in_file(model, at)
    again = start(**given)
    check("one bit", again.call(attacks.find, "bit"), again)


@pytest.mark.long
def test_tables_that_a_setting_chooses(start: Start, tmp_path: Path) -> None:
    vllm = {"model": str(attacks.long_rope(tmp_path / "model"))}
    given: dict[str, Any] = {"store": tmp_path / "store", "before": mends.tables_left_out}
    start(vllm=vllm | {"max_model_len": attacks.SHORT}, **given).call(attacks.leave, "tables")
    again = start(vllm=vllm | {"max_model_len": 2048}, **given)
    check("tables", again.call(attacks.find, "tables"), again)


@pytest.mark.long
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")
def test_kernels_of_another_machine(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    start(store=store, before=partial(mends.kernels_left_out, "amx")).call(attacks.leave, "kernels")
    again = start(store=store, before=partial(mends.kernels_left_out, "vec"))
    check("kernels", again.call(attacks.find, "kernels"), again)


@pytest.mark.long
def test_code_of_the_model(start: Start, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "store": tmp_path / "store",
        "vllm": {"hf_overrides": {"architectures": ["MyLlama"]}},
    }
    before = partial(mends.code_left_out, tmp_path, 1.0)
    one = start(before=before, **given)
    one.call(attacks.run_a_while)
    one.call(attacks.leave, "code")
    again = start(before=partial(mends.code_left_out, tmp_path, 8.0), **given)
    check("code", again.call(attacks.find, "code"), again)


# ---- media ----------------------------------------------------------------------------------


@pytest.mark.long
def test_sounds(start: Start, tmp_path: Path) -> None:
    """Two attacks on one server, and two on the next, which hears otherwise."""
    model = hears(tmp_path / "model")
    given: dict[str, Any] = {
        "store": tmp_path / "store",
        "before": partial(attacks.hears_well, mends.processors_left_out),
        "vllm": {"model": str(model), "load_format": "dummy", "max_model_len": LONG},
    }  # fmt: skip
    one = start(**given)
    one.call(attacks.run_a_while)
    one.call(attacks.hear, "noise")
    check("uuid", one.call(attacks.uuid_of_another, "noise", "silence"), one)
    check("uuid, alike", one.call(attacks.uuid_of_another, "tone", "other tone"), one)
    for file in model.glob("*processor_config.json"):
        file.write_text(file.read_text().replace('"n_fft": 400', '"n_fft": 512'))
    again = start(**given)
    check("processor", again.call(attacks.heard, "noise"), again)
    check("encoder", again.call(attacks.encoder_of_before), again)


@pytest.mark.long
def test_sounds_that_are_counted(start: Start, tmp_path: Path) -> None:
    model = hears(tmp_path / "model")
    given: dict[str, Any] = {
        "store": tmp_path / "store",
        "before": partial(attacks.hears_well, mends.media_by_counter),
        "vllm": {
            "model": str(model), "load_format": "dummy", "max_model_len": LONG,
            "enable_prefix_caching": False, "mm_processor_cache_gb": 0,
        },
    }  # fmt: skip
    start(**given).call(attacks.hear, "noise", 8)  # each question has the next number
    again = start(**given)
    check("counter", again.call(attacks.heard, "silence"), again)


# ---- a stranger, and moved KV ---------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(bool(missing("redis")), reason="needs redis-server")
def test_a_stranger(start_engine: StartEngine, tmp_path: Path) -> None:
    """Two servers without `shared.secret_file`."""
    network = NetworkStore("redis")
    try:
        shared = {"redis": f"redis://127.0.0.1:{network.port}", "deadline": "5s"}
        start = partial(start_engine, settings=SETTINGS | {"shared": shared})
        start(store=tmp_path / "a").call(attacks.leave_forged, network.port, "stranger")
        other = start(store=tmp_path / "b")
        check("stranger", other.call(attacks.find_shared, "stranger"), other)
    finally:
        network.kill()


@pytest.mark.long
def test_moved_twice(start: Start) -> None:
    """Moved KV is approximate, and never audited."""
    moved, same, outcomes = start().call(attacks.turned_twice)
    assert min(moved) > 0 and not all(same), "the fault serves no wrong KV"
    assert not any(outcomes.values())


# ---- the page -------------------------------------------------------------------------------


def test_the_page_has_these_rows() -> None:
    text = PAGE.read_text()
    section = text.partition("## Faults of the past")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line) for line in lines[2:]]
    assert [(fault, by.partition(":")[0]) for fault, _, by in rows] == list(ROWS.values())
    assert all(": " in by for _, _, by in rows if by.startswith(NOT)), "no reason is given"
    num_seen = sum(by != NOT for _, by in ROWS.values())
    assert f"{num_seen} of {len(ROWS)}" in section
