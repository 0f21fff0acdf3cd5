# SPDX-License-Identifier: Apache-2.0
"""What the tests of a real `vllm serve` have in common: starting, asking, ending and looking.

benchmarks/server.py starts the server; everything here waits with a deadline, never blindly.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from attnstore_vllm.cli.slab_file import RecordState, opened
from attnstore_vllm.connector.metrics import COUNTERS, GAUGES, HISTOGRAMS
from attnstore_vllm.preflight import SHM_DIR, SLAB_NAME
from attnstore_vllm.prometheus import total
from attnstore_vllm.tiers.nvme.format import SegmentHeader, header_bytes
from benchmarks.server import VllmServer, quiet_cpu_environment, vllm_command

DEADLINE_S = 120.0
START_DEADLINE_S = 400.0
"""A start imports vLLM three times over: 30 s on a quiet machine."""
END_DEADLINE_S = 60.0
FLAG = "--kv-transfer-config"
MODEL_NAME = "tiny"
ARGUMENTS = (
    "--served-model-name",
    MODEL_NAME,
    "--enforce-eager",
    "--max-model-len",
    "2048",
)
CHUNK = 256
BY_SETTINGS = ("shared_in_use", "tenant_held_bytes", "tenant_quota_bytes")
"""Gauges that are there with a shared tier, or with quotas, alone."""
SERIES = (
    *(f"vllm:attnstore_{name}_total" for name in COUNTERS),
    *(f"vllm:attnstore_{name}" for name in GAUGES if name not in BY_SETTINGS),
    *(f"vllm:attnstore_{name}_count" for name in HISTOGRAMS),
)


def settings(
    store: Path, dram: str = "32MiB", capacity: str = "64MiB", **nvme: str | int
) -> dict[str, Any]:
    """Of a store that loads whatever it has: a tiny model computes sooner than some disks read."""
    return {
        "dram": dram,
        "nvme": {"path": str(store), "capacity": capacity, **nvme},
        "compute_if_sooner": False,
        # Tests count hits: none is drawn, and a start tries nothing before it serves.
        "audit": "off",
    }


def in_json(extra: Mapping[str, Any]) -> str:
    """The settings as vLLM's own JSON."""
    return json.dumps(
        {
            "kv_connector": "AttnStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    )


def in_yaml(file: Path, extra: Mapping[str, Any]) -> str:
    """The settings as a YAML file, as the README shows it; returns its path."""
    nvme = ", ".join(f"{key}: {value}" for key, value in extra["nvme"].items())
    more = "".join(f"{key}: {extra[key]}\n" for key in extra if key not in ("dram", "nvme"))
    file.write_text(f"# made by a test\ndram: {extra['dram']}\nnvme: {{{nvme}}}\n{more}")
    return str(file)


def server(
    model: Path,
    log: Path,
    *arguments: str,
    cores: str = "0",
    environment: Mapping[str, str] | None = None,
) -> VllmServer:
    """A server to be entered; one OpenMP thread, so that tests disturb nobody."""
    return VllmServer(
        str(model),
        [*ARGUMENTS, *arguments],
        log,
        environment={
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            **(environment or {}),
        },
        start_deadline_s=START_DEADLINE_S,
    )


def refused(model: Path, log: Path, *arguments: str, cores: str = "0") -> str:
    """What `vllm serve` prints when it is to end by itself, with an exit code other than 0."""
    with log.open("wb") as output:
        done = subprocess.run(
            [*vllm_command(), "serve", str(model), *ARGUMENTS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet_cpu_environment(), "VLLM_CPU_OMP_THREADS_BIND": cores},
            timeout=START_DEADLINE_S,
            check=False,
        )
    printed = log.read_text(errors="replace")
    assert done.returncode != 0, printed
    return printed


# ---- asking ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int


def story(seed: object, words: int = 500) -> str:
    """Text of about 1.6 tokens a word; stories of different seeds share no chunk."""
    rng = Random(repr(seed))
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(words))


def post(server: VllmServer, path: str, body: object = None) -> tuple[int, bytes]:
    """(status, answer), also for statuses that mean an error."""
    request = urllib.request.Request(
        server.base_url + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask(server: VllmServer, text: str, max_tokens: int = 12, **fields: Any) -> Answer:
    """A greedy chat completion."""
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    status, answer = post(server, "/v1/chat/completions", body | fields)
    assert status == 200, f"{status}: {answer.decode(errors='replace')}\n{server.log_tail()}"
    found = json.loads(answer)
    return Answer(found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens"])


def empty_hbm(server: VllmServer, *, drop_store: bool = False) -> None:
    """Empty vLLM's own prefix cache. It refuses while blocks are held: ask until it does."""

    def emptied() -> bool:
        nudge(server)
        query = "?reset_external=true" if drop_store else ""
        status, answer = post(server, f"/reset_prefix_cache{query}")
        assert status == 200, f"{status}: {answer!r}\n{server.log_tail()}"
        return not answer or json.loads(answer).get("success", True)

    wait_until(emptied, "HBM's prefix cache was emptied")


def nudge(server: VllmServer) -> None:
    """One more step of the engine, so that metrics are brought up to date. Stores nothing."""
    ask(server, "hi", max_tokens=1)


def is_healthy(server: VllmServer) -> bool:
    with urllib.request.urlopen(server.base_url + "/health", timeout=DEADLINE_S) as answer:
        return bool(answer.status == 200)


# ---- looking -----------------------------------------------------------------------------


def wait_until(
    condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S, poll_s: float = 0.1
) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(poll_s)


def count(server: VllmServer, name: str, **labels: str) -> float:
    return total(server.metrics(), f"vllm:attnstore_{name}_total", **labels)


def loaded(server: VllmServer) -> dict[str, float]:
    """Tokens loaded so far, by tier."""
    metrics = server.metrics()
    name = "vllm:attnstore_loaded_tokens_total"
    return {tier: total(metrics, name, tier=tier) for tier in ("dram", "nvme")}


def ask_and_count(server: VllmServer, text: str) -> tuple[Answer, dict[str, float]]:
    """Ask with HBM emptied; the answer, and the tokens that were loaded for it, by tier."""
    empty_hbm(server)
    before = loaded(server)
    answer = ask(server, text)
    nudge(server)  # its answer came after the counters of the one before
    after = loaded(server)
    return answer, {tier: after[tier] - before[tier] for tier in after}


def ask_and_store(server: VllmServer, text: str) -> Answer:
    """Ask, and wait until all that was saved is on NVMe."""
    answers: list[Answer] = []

    def store() -> int:
        answers.append(ask(server, text))
        return answers[0].prompt_tokens

    do_and_store(server, store)
    return answers[0]


def know_weights(server: VllmServer) -> None:
    """Wait until it is known whose KV there is: before, requests find and leave nothing."""

    def are_known() -> bool:
        before = count(server, "skipped", cause="weights_unknown")
        nudge(server)
        nudge(server)  # the first one may be counted in its step
        return count(server, "skipped", cause="weights_unknown") == before

    wait_until(are_known, "the weights are known")


def do_and_store(server: VllmServer, store: Callable[[], int]) -> None:
    """Wait until all that was saved is on NVMe; `store` asks, and says how long the prompt was."""
    know_weights(server)
    before = count(server, "chunks", event="written")
    chunks = store() // CHUNK  # and a tail, where it is long enough

    def is_stored() -> bool:
        nudge(server)
        metrics = server.metrics()
        name = "vllm:attnstore_chunks_total"
        written = total(metrics, name, event="written")
        saved, superseded = (total(metrics, name, event=e) for e in ("saved", "superseded"))
        return written >= before + chunks and written >= saved - superseded

    wait_until(is_stored, "what was saved is on NVMe")


def assert_no_region() -> None:
    """Nothing of ours stays in /dev/shm. Other servers' starts leave a name there for seconds."""
    seen = {path.name for path in SHM_DIR.glob("attnstore-*")}
    wait_until(
        lambda: not seen & {path.name for path in SHM_DIR.glob("attnstore-*")},
        f"of {sorted(seen)} nothing is left in {SHM_DIR}",
        END_DEADLINE_S,
    )


def flip_payloads(store: Path) -> int:
    """Damage the payload of every record that is in the slab; returns how many."""
    flipped = 0
    with opened(store / SLAB_NAME, writable=True) as slab:
        for _, segment in slab.segments():
            assert isinstance(segment, SegmentHeader | None)
            if segment is None:
                continue
            for record in slab.records(segment, payloads=False):
                if record.state is not RecordState.GOOD:
                    continue
                at = record.offset + header_bytes(segment.chunk_tokens)
                payload = os.pread(slab.fd, segment.payload_bytes, at)
                os.pwrite(slab.fd, bytes(byte ^ 0x55 for byte in payload), at)
                flipped += 1
        os.fsync(slab.fd)
    return flipped


# ---- ending ------------------------------------------------------------------------------


def exit_code(server: VllmServer) -> int:
    """Wait for the server's end: its exit code, or the negated signal that killed it.

    It is left to be reaped by server.stop().
    """
    found: list[Any] = []

    def has_ended() -> bool:
        how = os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        found.append(how)
        return how is not None

    wait_until(has_ended, f"the server has ended\n{server.log_tail()}", END_DEADLINE_S)
    how = found[-1]
    return int(how.si_status if how.si_code == os.CLD_EXITED else -how.si_status)


def members(session: int) -> list[psutil.Process]:
    """The living processes of a server, which has a session of its own."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def engine_core(server: VllmServer) -> psutil.Process:
    (core,) = [p for p in members(server.pid) if "EngineCore" in " ".join(p.cmdline())]
    return core
