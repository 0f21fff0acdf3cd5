# SPDX-License-Identifier: Apache-2.0
"""Spans in a collector, and a recorded trace in the simulator, under vLLM's real scheduler."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.one_pool import replay
from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.scheduler.observed import CLOSE_DEADLINE_S, ObservedScheduler, Watched
from attnstore_vllm.scheduler.recorder import Recorder
from attnstore_vllm.scheduler.scheduler import Scheduler
from tests.helpers import wait_until
from tests.vllm.scripted import CHUNK, ScriptedEngine

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2 as otlp,
)

PROMPT = [n % 47 for n in range(3 * CHUNK + 20)]
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent = otlp.ExportTraceServiceRequest.FromString(body)
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@contextmanager
def engine_of(
    model: Path, store: Path, endpoint: str | None = None, **settings: Any
) -> Iterator[ScriptedEngine]:
    class Traced(ScriptedEngine):
        def _set(self, config: Any) -> None:
            config.observability_config.otlp_traces_endpoint = endpoint

    engine = Traced(model, store, num_blocks=64, depth=2, seed=1, **settings)
    try:
        yield engine
    finally:
        engine.close()


def run(engine: ScriptedEngine, name: str, prompt: list[int], max_tokens: int = 4) -> Any:
    """Returns vLLM's request."""
    engine.add(name, prompt, max_tokens)
    request: Any = engine.scheduler.requests[name]
    request.trace_headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    engine.drain()
    return request


def forget(engine: ScriptedEngine, *, dram: bool) -> None:
    """HBM has nothing, nor has DRAM."""
    store = engine.ours.store
    wait_until(store.is_idle, store)
    assert engine.scheduler.reset_prefix_cache()
    if dram:
        with store.queue():
            for chunk in list(store.residency.dram.owned.values()):
                store.residency.leave_dram(chunk)


def facts(span: Any) -> dict[str, Any]:
    return {
        a.key.removeprefix("attnstore."): getattr(a.value, a.value.WhichOneof("value"))
        for a in span.attributes
    }


def by_request(spans: list[Any]) -> dict[str, dict[str, Any]]:
    """Spans by request and name."""
    wholes = {span.span_id: facts(span)["request_id"] for span in spans if _is_whole(span)}
    found: dict[str, dict[str, Any]] = {name: {} for name in wholes.values()}
    for span in spans:
        owner = wholes.get(span.span_id) or wholes[span.parent_span_id]
        found[owner][span.name.removeprefix("attnstore.")] = span
    return found


def _is_whole(span: Any) -> bool:
    return bool(span.name == "attnstore.request")


def test_a_collector_sees_what_a_request_did(
    model: Path, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with engine_of(model, tmp_path / "store", collector.url) as engine:
        token_bytes = engine.ours.geometry.token_bytes()
        run(engine, "cold", PROMPT)
        forget(engine, dram=False)
        run(engine, "warm", PROMPT)
        forget(engine, dram=True)
        run(engine, "deep", PROMPT)
    seen = by_request(collector.spans)  # close() has sent them
    assert set(seen) == {"cold", "warm", "deep"}
    for spans in seen.values():
        whole = spans["request"]
        assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
        for span in spans.values():
            assert span.trace_id == whole.trace_id
            times = (span.start_time_unix_nano, span.end_time_unix_nano)
            assert whole.start_time_unix_nano <= times[0] <= times[1] <= whole.end_time_unix_nano
    cold, warm, deep = seen["cold"], seen["warm"], seen["deep"]
    assert set(cold) == {"request", "lookup", "wait"}, "it waits for a look at the weights"
    assert facts(cold["lookup"])["stored_tokens"] == 0
    assert facts(cold["request"])["decision"] == "compute"
    assert facts(cold["request"])["computed_tokens"] == len(PROMPT)
    stored = facts(warm["lookup"])["stored_tokens"]
    assert 3 * CHUNK <= stored < len(PROMPT)
    for spans, tier in ((warm, "dram_tokens"), (deep, "nvme_tokens")):
        load = facts(spans["load"])
        assert facts(spans["lookup"])[tier] == load[tier] == load["tokens"] == stored
        assert load["tokens"] * token_bytes <= load["bytes"] < (stored + 16) * token_bytes
        assert facts(spans["request"])["decision"] == "load"
    assert deep["wait"].end_time_unix_nano <= deep["load"].start_time_unix_nano


def test_no_collector_costs_no_request_and_no_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with engine_of(model, tmp_path / "store", "http://127.0.0.1:9/v1/traces") as engine:
        run(engine, "a", PROMPT)
        forget(engine, dram=False)
        engine.ours.check_quiet()
        began = time.monotonic()
    assert time.monotonic() - began < CLOSE_DEADLINE_S + 2


def test_who_wants_neither_has_the_plain_scheduler(model: Path, tmp_path: Path) -> None:
    with engine_of(model, tmp_path / "store") as engine:
        assert type(engine.ours) is Scheduler


def test_a_recorded_trace_finds_in_the_simulator_what_the_server_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, loaded, record = {"path": str(tmp_path / "trace")}, Counter[str](), Recorder.ended

    def ended(made: Recorder, seen: Watched) -> None:
        loaded.update(seen.state.counted.sources)
        record(made, seen)

    monkeypatch.setattr(Recorder, "ended", ended)
    with engine_of(model, tmp_path / "store", trace=trace) as engine:
        assert type(engine.ours) is ObservedScheduler
        talks = [[100 * talk + n % 41 for n in range(45 + 9 * talk)] for talk in range(4)]
        for turn in range(5):
            for number, talk in enumerate(talks):
                request = run(engine, f"{number}.{turn}", talk, 8)
                talks[number] = [*request.all_token_ids, *[turn] * (20 + number)]
                forget(engine, dram=False)
    found = read_trace(tmp_path / "trace" / "requests.jsonl", Arrivals())
    assert found.chunk_tokens == CHUNK
    assert len(found.requests) == 20
    replayed = replay(found, "infinite", 1.0)
    assert loaded.total() > 0.5 * found.num_tokens
    assert replayed.hit_tokens == pytest.approx(loaded.total(), rel=0.02)
    lines = (tmp_path / "trace" / "requests.jsonl").read_text().splitlines()
    keys = {key for line in lines[1:] for key in json.loads(line)}
    assert keys == {"timestamp", "input_length", "output_length", "known_length", "hash_ids"}


def test_two_runs_give_the_same_prompt_no_common_hash(model: Path, tmp_path: Path) -> None:
    hashes = []
    for name in ("a", "b"):
        with engine_of(model, tmp_path / name, trace={"path": str(tmp_path / "trace")}) as engine:
            run(engine, name, PROMPT)
        line = (tmp_path / "trace" / "requests.jsonl").read_text().splitlines()[1]
        hashes.append(set(json.loads(line)["hash_ids"]))
    assert not hashes[0] & hashes[1], "a guess of a prompt could be tried on the file"
    assert (tmp_path / "trace" / "requests.before.jsonl").exists()
