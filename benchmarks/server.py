# SPDX-License-Identifier: Apache-2.0
"""The server of `attnstore bench compare`, by the name that benchmarks and tests know."""

from attnstore_vllm.bench.metrics import Metrics, parse_metrics, total
from attnstore_vllm.bench.server import (
    ServerError,
    VllmServer,
    quiet_cpu_environment,
    read_metrics,
    vllm_program,
)

__all__ = [
    "Metrics",
    "ServerError",
    "VllmServer",
    "parse_metrics",
    "quiet_cpu_environment",
    "read_metrics",
    "total",
    "vllm_program",
]
