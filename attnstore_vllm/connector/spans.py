# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests, beside vLLM's own (--otlp-traces-endpoint).

    attnstore.request                     as a child of the trace that the client has sent
      attnstore.lookup                    what is stored, by tier
      attnstore.wait                      for KV to come up from NVMe, and its forecast
      attnstore.load                      into HBM: tokens by tier, bytes, what computing would take

The engine has a provider of its own: vLLM sets none up there. Its exporter has a thread and a queue
with a limit, so that a collector that is slow or away costs spans and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from attnstore_vllm.scheduler.observed import Facts, Watched

if TYPE_CHECKING:
    from attnstore_vllm.scheduler.scheduler import Scheduler

PREFIX = "attnstore."


class SpanWatcher:
    """A watcher that exports a span of each request, with its phases in it."""

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        # Not the process's provider, which is the user's; ended by close(), never at exit.
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("attnstore_vllm", version)

    def begin(self, scheduler: Scheduler) -> None:
        """It asks for nothing but what it is told."""

    def ended(self, seen: Watched) -> None:
        request: Any = seen.state.request
        headers = getattr(request, "trace_headers", None) or {}
        whole = self._tracer.start_span(
            f"{PREFIX}request",
            TraceContextTextMapPropagator().extract(headers, Context()),
            start_time=seen.start_ns,
            attributes=_named(seen.facts() | {"request_id": request.request_id}),
        )
        inside = trace.set_span_in_context(whole, Context())
        for phase in seen.phases:
            span = self._tracer.start_span(
                f"{PREFIX}{phase.name}",
                inside,
                start_time=phase.start_ns,
                attributes=_named(phase.facts),
            )
            span.end(phase.end_ns)
        whole.end(seen.end_ns)

    def close(self) -> None:
        self._provider.shutdown()


def _named(facts: Facts) -> Facts:
    return {f"{PREFIX}{name}": value for name, value in facts.items()}
