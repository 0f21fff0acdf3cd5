# SPDX-License-Identifier: Apache-2.0
"""Beside connectors that move KV between servers: the order is looked at when a server starts."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="the connector's modules import it")

from attnstore_vllm.connector.support import warn_of_order


@pytest.mark.parametrize(
    ("names", "warns"),
    [
        (["NixlConnector", "AttnStoreConnector"], False),
        (["AttnStoreConnector", "NixlConnector"], True),
        (["AttnStoreConnector", "MooncakeStoreConnector"], False),
        (["MooncakeConnector", "AttnStoreConnector", "NixlConnector"], True),
        (["NixlConnector"], False),
        (None, False),
    ],
)
def test_a_warning_when_ours_comes_first(
    names: list[str] | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = SimpleNamespace(
        kv_connector="MultiConnector" if names is not None else "AttnStoreConnector",
        kv_connector_extra_config={"connectors": [{"kv_connector": n} for n in names or ()]},
    )
    with caplog.at_level(logging.WARNING):
        warn_of_order(cast("Any", transfer))
    assert bool([r for r in caplog.records if "before AttnStoreConnector" in r.message]) == warns
