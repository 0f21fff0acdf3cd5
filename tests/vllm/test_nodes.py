# SPDX-License-Identifier: Apache-2.0
"""Engines whose two pipeline stages are on two nodes: answers, and what is found.

Goal: such an engine answers to the last bit as one on one node without the store does, and finds as
many tokens in DRAM and on NVMe; also over a restart, and where a node's disk is lost or a node was
killed.
Method: vLLM's CPU build started as on two machines (`--nnodes 2`), over the loopback. The second
has a mount namespace of its own, with another /dev/shm: the two share no memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.tiers.nvme.node_disk import FILE_NAME
from attnstore_vllm.types import Event
from benchmarks.server import Process, vllm_command
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine, EngineSpec, store_settings
from tests.vllm.host import ENVIRONMENT, EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.serve_helpers import assert_no_region
from tests.vllm.test_pipeline import ANSWER, LENGTHS, STORED, THREE, Answers, ask_again, ask_twice

REPOSITORY = Path(__file__).parents[2]
OWN_MEMORY = ["unshare", "--mount", "sh", "-c"]
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
FIRST, SECOND = ({"VLLM_CPU_OMP_THREADS_BIND": core, **LOOPBACK} for core in ("0", "1"))
Start = Callable[..., EngineHost]

pytestmark = pytest.mark.skipif(
    subprocess.run([*OWN_MEMORY, "mount -t tmpfs tmpfs /dev/shm"], check=False).returncode != 0,
    reason="this user may make no mount namespace",
)


def on_first_node() -> None:
    os.environ.update(FIRST)


class TwoNodes:
    """An engine on the first node, and vLLM's headless process with the second stage."""

    def __init__(self, models: Path, directory: Path) -> None:
        self._models, self.directory = models, directory
        self.stores = [directory / f"store {node}" for node in (0, 1)]
        self._stack = ExitStack()

    def start(self) -> EngineHost:
        self.stop()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        parallel: dict[str, Any] = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
        spec = EngineSpec(
            store=self.stores[0], models=self._models, shape=THREE, dram="16MiB",
            pipeline_parallel=2, before=on_first_node,
            vllm={**parallel, "distributed_executor_backend": "mp"},
        )  # fmt: skip
        self.second = Process(self._headless(spec, port), self.directory / "log 1", self._around())
        self._stack.callback(self.second.stop)
        host = EngineHost(spec, self.directory / "log 0")
        self._stack.callback(host.close)
        return host

    def stop(self) -> None:
        self._stack.close()

    def _around(self) -> dict[str, str]:
        """The worker unpickles functions of the tests, so it must find them."""
        found = {"PYTHONPATH": str(REPOSITORY), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        return {**ENVIRONMENT, **SECOND, **found}

    def kv_transfer(self, store: Path, spec: EngineSpec) -> dict[str, Any]:
        """The second node's."""
        return {
            "kv_connector": "AttnStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": store_settings(replace(spec, store=store)),
        }

    def _headless(self, spec: EngineSpec, port: int) -> list[str]:
        model = make_model(self._models / "model-192-6-2", THREE)
        transfer = self.kv_transfer(self.stores[1], spec)
        arguments = {
            "dtype": "bfloat16", "max-model-len": THREE.max_position, "pipeline-parallel-size": 2,
            "num-gpu-blocks-override": spec.blocks, "nnodes": 2, "node-rank": 1,
            "master-addr": "127.0.0.1", "master-port": port, "distributed-executor-backend": "mp",
            "kv-transfer-config": json.dumps(transfer),
        }  # fmt: skip
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        serve = [*vllm_command(), "serve", str(model), "--enforce-eager", "--headless", *words]
        mount = 'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$@"'
        return [*OWN_MEMORY, mount, "sh", *serve]


@pytest.fixture(scope="module")
def expected(start_engine: StartEngine) -> Answers:
    """Those of one stage, without the store."""
    host = start_engine(shape=THREE, store=None)
    answers, _ = host.call(ask_twice)
    host.close()
    return answers


@pytest.fixture(scope="module")
def nodes(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    found = TwoNodes(models, tmp_path_factory.mktemp("nodes"))
    yield found
    found.stop()


def count(engine: Engine, event: Event) -> int:
    return engine.store.residency.counts[event]


def test_answers_and_tokens_found_are_those_of_one_node(nodes: TwoNodes, expected: Answers) -> None:
    engine = nodes.start()
    answers, loaded = engine.call(ask_twice, "dram")
    assert answers == expected
    assert loaded == {"dram": STORED, "nvme": 0}
    answers, loaded = engine.call(ask_again, "nvme")
    assert answers == expected[len(LENGTHS) :]
    assert loaded == {"dram": 0, "nvme": STORED}
    engine.call(Engine.check_quiet)
    assert nodes.second.exit_code is None
    assert (nodes.stores[1] / FILE_NAME).stat().st_size > 0
    assert not (nodes.stores[1] / "slab").exists()


@pytest.mark.long
def test_a_restart(nodes: TwoNodes, expected: Answers) -> None:
    again, loaded = nodes.start().call(ask_again, "stored")
    assert again == expected[len(LENGTHS) :]
    assert loaded == {"dram": 0, "nvme": STORED}


@pytest.mark.long
def test_a_node_that_was_killed(nodes: TwoNodes, expected: Answers) -> None:
    """With what it had in DRAM. A start finds what both had written."""
    first = nodes.start()
    first.call(ask_again, "stored")
    os.killpg(nodes.second.pid, signal.SIGKILL)
    again, loaded = nodes.start().call(ask_again, "stored")
    assert again == expected[len(LENGTHS) :]
    assert loaded == {"dram": 0, "nvme": STORED}


@pytest.mark.long
def test_a_node_with_another_disk(nodes: TwoNodes, expected: Answers) -> None:
    nodes.stop()
    (nodes.stores[1] / FILE_NAME).unlink()
    engine = nodes.start()
    answers, loaded = engine.call(ask_again, "stored")
    assert [a.tokens for a in answers] == [a.tokens for a in expected[: len(LENGTHS)]]
    assert loaded == {"dram": 0, "nvme": 0}
    assert engine.call(count, Event.GONE) >= len(LENGTHS)
    answers, loaded = engine.call(ask_again, "nvme")
    assert answers == expected[len(LENGTHS) :]
    assert loaded == {"dram": 0, "nvme": STORED}, "it is stored again"


@pytest.mark.long
def test_machines_that_change_places(nodes: TwoNodes, expected: Answers) -> None:
    """What both have of before would take more than the capacity. They begin anew."""
    for _ in range(2):
        nodes.stop()
        nodes.stores.reverse()
        answers, loaded = nodes.start().call(ask_again, "anew")
        assert [a.tokens for a in answers] == [a.tokens for a in expected[: len(LENGTHS)]]
        assert loaded == {"dram": 0, "nvme": 0}
        assert not (nodes.stores[0] / FILE_NAME).exists()
        assert not (nodes.stores[1] / SLAB_NAME).exists()


@pytest.mark.long
def test_a_node_that_cannot_have_itsdirectory(nodes: TwoNodes, expected: Answers) -> None:
    """The engine starts and is idle, and both logs say why."""
    nodes.stop()
    nodes.stores[1].mkdir(exist_ok=True)
    (nodes.stores[1] / FILE_NAME).unlink(missing_ok=True)
    (nodes.stores[1] / FILE_NAME).symlink_to("elsewhere")
    engine = nodes.start()
    assert engine.call(generated) == [a.tokens for a in expected[: len(LENGTHS)]]
    for log in ("log 0", "log 1"):
        assert "is a link; expected a regular file" in (nodes.directory / log).read_text()
    assert "AttnStore is idle" in (nodes.directory / "log 0").read_text()


def generated(engine: Engine) -> list[tuple[int, ...]]:
    """Without a look at our side: it is idle."""
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [random_tokens(("pipeline", length), length) for length in LENGTHS]
    found = [
        engine.llm.generate({"prompt_token_ids": prompt}, how, use_tqdm=False) for prompt in prompts
    ]
    return [tuple(outputs[0].outputs[0].token_ids) for outputs in found]


def test_nothing_is_left_in_memory(nodes: TwoNodes) -> None:
    nodes.stop()
    assert_no_region()
