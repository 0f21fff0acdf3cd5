# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` whose disk goes bad under it: slower, never wrong, never down.

DRAM is so small that a dozen stories push everything else out of it, least recently used first.
The tests of a module share the server, and each one leaves it more damaged than it was.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.index.prefix import whole_blocks
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.prometheus import total
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import FLAG, Answer, ask, ask_and_count, ask_and_store, count, story

DRAM = "4MiB"
"""24 chunks of TINY; a story takes four."""


@dataclass(frozen=True, slots=True)
class Live:
    server: VllmServer
    store: Path

    def push_out(self, seed: str) -> None:
        """Fill DRAM with other stories."""
        for number in range(12):
            ask_and_store(self.server, story((seed, number)))

    def ask_from_nvme(self, seed: str) -> Answer:
        """Ask, and leave the story's KV on NVMe only."""
        answer = ask_and_store(self.server, story(seed))
        self.push_out(seed)
        serving.wait_until(self._is_written, "all is written")  # else DRAM has no room to spare
        return answer

    def _is_written(self) -> bool:
        return total(self.server.metrics(), "vllm:attnstore_dirty_bytes") == 0


@pytest.fixture(scope="module")
def live(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    home = tmp_path_factory.mktemp("faults")
    model = make_model(models / "serve", TINY)
    # Without the scrubber, which would find the damage before a request does.
    settings = serving.settings(home / "store", dram=DRAM, scrub="off") | {"eviction": "lru"}
    transfer = serving.in_yaml(home / "a.yaml", settings)
    with serving.server(model, home / "log", FLAG, transfer) as server:
        yield Live(server, home / "store")
    serving.assert_no_region()


def test_without_a_fault_it_comes_from_nvme(live: Live) -> None:
    computed = live.ask_from_nvme("sound")
    again, tokens = ask_and_count(live.server, story("sound"))
    assert again == computed
    assert tokens == {"dram": 0, "nvme": whole_blocks(computed.prompt_tokens - 1)}
    assert count(live.server, "errors", kind="corrupt") == 0
    assert count(live.server, "errors", kind="read_failed") == 0


def test_damaged_payloads_are_computed_anew(live: Live) -> None:
    computed = live.ask_from_nvme("damaged")
    before = count(live.server, "errors", kind="corrupt")
    assert serving.flip_payloads(live.store) > computed.prompt_tokens // serving.CHUNK
    again, tokens = ask_and_count(live.server, story("damaged"))
    assert again == computed
    assert tokens == {"dram": 0, "nvme": 0}
    assert count(live.server, "errors", kind="corrupt") > before
    assert count(live.server, "recomputations", cause="lost") > 0
    assert serving.is_healthy(live.server)

    stored = {"dram": whole_blocks(computed.prompt_tokens - 1), "nvme": 0}
    for _ in range(3):  # what was still being read when it was computed is saved by the next one
        again, tokens = ask_and_count(live.server, story("damaged"))
        assert again == computed
        if tokens == stored:
            break
    assert tokens == stored, "it was saved anew"


def test_a_reset_of_the_connector_forgets_all_tiers(live: Live) -> None:
    computed = live.ask_from_nvme("forgotten")
    serving.empty_hbm(live.server, drop_store=True)
    again, tokens = ask_and_count(live.server, story("forgotten"))
    assert again == computed
    assert tokens == {"dram": 0, "nvme": 0}


def test_a_slab_that_was_cut_off(live: Live) -> None:
    computed = live.ask_from_nvme("cut")
    before = count(live.server, "errors", kind="read_failed")
    os.truncate(live.store / SLAB_NAME, 4096)
    again, tokens = ask_and_count(live.server, story("cut"))
    assert again == computed
    assert tokens == {"dram": 0, "nvme": 0}
    assert count(live.server, "errors", kind="read_failed") > before
    assert serving.is_healthy(live.server)


def test_a_directory_that_vanishes(live: Live) -> None:
    computed = ask_and_store(live.server, story("vanished"))
    shutil.rmtree(live.store)
    again, tokens = ask_and_count(live.server, story("vanished"))
    assert again == computed
    assert tokens == {"dram": whole_blocks(computed.prompt_tokens - 1), "nvme": 0}
    for number in range(30):
        ask(live.server, story(("after", number)))
    serving.empty_hbm(live.server)
    assert ask(live.server, story("vanished")) == computed
    assert serving.is_healthy(live.server)


def test_and_it_ends_as_if_nothing_had_been(live: Live) -> None:
    os.kill(live.server.pid, signal.SIGTERM)
    assert serving.exit_code(live.server) == 0
    # vLLM may show a traceback of its own: it kills the engine core while it still listens to it.
    assert "/attnstore_vllm/" not in live.server.log.read_text(errors="replace")
