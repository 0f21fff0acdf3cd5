# SPDX-License-Identifier: Apache-2.0
"""Of which engines stored KV can be compared with what they compute once more."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.connector import audit_facts
from attnstore_vllm.connector.audit_facts import comparison_of
from attnstore_vllm.identity.rank import KvFacts, KvPage, RankDescription
from attnstore_vllm.transfer.geometry import Geometry

TOKENS, HEADS, DIM = 16, 2, 8
SIDE = TOKENS * HEADS * DIM
PAGE = KvPage(
    "bfloat16", TOKENS, HEADS, DIM,
    key=(0, TOKENS * DIM, TOKENS, 0, DIM, DIM, 0, 1),
    value=(SIDE, TOKENS * DIM, TOKENS, 0, DIM, DIM, 0, 1),
)  # fmt: skip
RANK = RankDescription(
    KvFacts("cpu", "bfloat16", (HEADS, TOKENS, 2 * DIM), 64, (0, 1), (1, 1), "", "kernel", ()),
    rows=None, slots=8, is_alone=True, own_files=None, why_not_moved=None, page=PAGE,
)  # fmt: skip
GEOMETRY = Geometry.uniform(1, 2, TOKENS, 2 * SIDE * 2, 64)


def test_what_another_connector_brings_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Which KV it brings a request may say (`do_remote_prefill`): it would end the serving of
    all."""
    assert comparison_of(AuditConfig(), GEOMETRY, [RANK], 0) is not None
    log = logging.getLogger(audit_facts.__name__)
    log.addHandler(caplog.handler)
    beside = replace(RANK, is_alone=False)
    assert comparison_of(AuditConfig(), GEOMETRY, [RANK, beside], 0) is None
    log.removeHandler(caplog.handler)
    assert "another connector" in caplog.text
