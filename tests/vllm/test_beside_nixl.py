# SPDX-License-Identifier: Apache-2.0
"""Beside connectors that move KV from a server that prefills to one that decodes."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector.support import warn_of_order
from benchmarks.server import VllmServer
from tests.vllm.prompts import random_tokens
from tests.vllm.serve_helpers import FLAG, MODEL_NAME, count, nudge, post, server, settings

LENGTH = 1100
NIXL = next((n for n in ("nixl_cu12", "nixl_cu13", "nixl") if importlib.util.find_spec(n)), None)
WANTED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""As a proxy asks a server that prefills for its KV."""


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


def alias(directory: Path) -> Path:
    """A folder with a package `nixl`, which is the one that is installed: wheels for one version of
    CUDA have another name, and vLLM knows that one alone."""
    package = directory / "nixl"
    if package.name == NIXL:
        return directory
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"import sys\nfrom {NIXL} import _api, _bindings\n"
        "sys.modules.update({'nixl._api': _api, 'nixl._bindings': _bindings})\n"
    )
    return directory


def beside_nixl(store: Path, role: str) -> str:
    children = [
        {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
        {
            "kv_connector": "AttnStoreConnector",
            "kv_role": role,
            "kv_connector_extra_config": settings(store),
        },
    ]
    return json.dumps(
        {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
    )


def complete(
    at: VllmServer, prompt: list[int], max_tokens: int, params: Mapping[str, Any] | None
) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    status, answer = post(at, "/v1/completions", body)
    assert status == 200, f"{status}: {answer!r}\n{at.log_tail()}"
    found: dict[str, Any] = json.loads(answer)
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.long
@pytest.mark.skipif(NIXL is None, reason="nixl is not installed (pip install nixl)")
def test_prefill_here_and_decode_there(models: Path, tmp_path: Path) -> None:
    """KV comes by NIXL, the decoding server keeps it, and its next turn finds it."""
    path = [str(alias(tmp_path / "alias")), os.environ.get("PYTHONPATH", "")]
    model, servers = make_model(models / "serve", TINY), []
    with ExitStack() as stack:
        for core, role in enumerate(("kv_producer", "kv_consumer")):
            environment = {
                "PYTHONPATH": os.pathsep.join(path),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": "tcp,self,sm",
                "UCX_NET_DEVICES": "lo",
            }
            transfer = beside_nixl(tmp_path / role, role)
            # NIXL's progress thread takes a core.
            started = server(
                model,
                tmp_path / f"{role}.log",
                FLAG,
                transfer,
                cores=str(core % (os.cpu_count() or 1)),
                environment=environment,
            )
            servers.append(stack.enter_context(started))
        there, here = servers
        prompt = random_tokens("nixl", LENGTH)
        prefilled = complete(there, prompt, 1, WANTED)
        decoded = complete(here, prompt, 12, prefilled["kv_transfer_params"])
        assert count(here, "chunks", event="saved") >= LENGTH // 256
        alone = complete(there, prompt, 12, None)
        assert text_of(decoded) == text_of(alone)
        status, _ = post(here, "/reset_prefix_cache")
        assert status == 200
        nudge(here)
        again = complete(here, prompt, 12, None)
        nudge(here)
        assert text_of(again) == text_of(alone)
        loaded = sum(count(here, "loaded_tokens", tier=tier) for tier in ("dram", "nvme"))
        assert loaded >= LENGTH - 100, "what came by NIXL is in our tiers"
        log = (tmp_path / "kv_consumer.log").read_text(errors="replace")
        assert "before AttnStoreConnector" not in log
