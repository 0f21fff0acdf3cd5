# SPDX-License-Identifier: Apache-2.0
"""Real servers, with the store and without, and what is asked of them."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Final, Protocol

from attnstore_vllm.errors import AttnStoreError
from attnstore_vllm.prometheus import total
from benchmarks.e2e.cases import Case, Size
from benchmarks.hit_latency import Client
from benchmarks.rounding import CANDIDATES, LogProbs
from benchmarks.server import ServerError, VllmServer
from benchmarks.throughput import one_round

DOUBLES: Final = Path(__file__).parent / "doubles"
LOADED: Final = "vllm:attnstore_loaded_tokens_total"
ANSWER_DEADLINE_S: Final = 180.0
FACTS: Final = (
    r"Using \w+ KV cache layout",
    r"Using V2 Model Runner",
    r"Using \w+ attention backend",
    r"Using AttentionBackendEnum\.\w+ backend",
    r"GPU KV cache size: [\d,]+ tokens",
    r"CPU KV cache size: [\d,]+ tokens",
    r"CUDA kernels: \S+",
    r"AttnStore \S+: a token takes .*",
    r"DRAM: [\d,]+ tokens in .*",
    r"NVMe: [\d,]+ tokens in .*",
)
"""Lines of a log that say what this server really is."""
PREFIX: Final = re.compile(r"^.*?(?:INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ (?:\[[^\]]*\] )?")


class Late(AttnStoreError):
    """A case was not over in its time. What it had started was ended."""


class Killable(Protocol):
    def kill(self) -> None: ...


class Deadline:
    """The time of one case: when it is over, the servers that it has are ended, and no other
    starts. So whatever waits for their answers gets an error.

    Each server has a process group of its own, and is ended by its number.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False
        self._running: list[Killable] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self.is_over and isinstance(error, Exception):
            raise Late(f"not over within {self.seconds:.0f} s; its servers were ended") from error

    @contextmanager
    def watches(self, running: Killable) -> Iterator[None]:
        """While this is open, `running` is ended with the deadline. Raises: Late if it has been."""
        with self._lock:
            if self.is_over:
                raise Late(f"not over within {self.seconds:.0f} s")
            self._running.append(running)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(running)

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for running in self._running:
                running.kill()


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one answer, and the candidates for each."""

    tokens: tuple[int, ...]
    logprobs: tuple[LogProbs, ...]


NO_NUMBERS: Final = Answer((-1,), (((-1, math.nan),),))
"""The answer of a model whose log-probabilities are NaN: vLLM cannot write it."""


class Served:
    """A server that runs."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.port = server.port

    def ask(self, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> Answer:
        """A greedy answer; under a salt, of KV of its own. Raises: OSError, HTTPException,
        ValueError if there is none."""
        body: dict[str, Any] = {
            "max_tokens": max_tokens,
            "logprobs": CANDIDATES,
            "return_tokens_as_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        connection = self._post(prompt, **body)
        try:
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status == 400 and b"Out of range float" in text:
            return NO_NUMBERS
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {text[:300].decode(errors='replace')}")
        found = json.loads(text)["choices"][0]["logprobs"]
        return Answer(
            tuple(map(_number, found["tokens"])), tuple(map(_candidates, found["top_logprobs"]))
        )

    def ask_and_leave(self, prompt: Sequence[int], max_tokens: int, after_s: float) -> None:
        """Ask, and close the connection after a while, whatever has come by then."""
        connection = self._post(prompt, max_tokens=max_tokens, stream=True)
        time.sleep(after_s)
        connection.close()

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[None]:
        """Yield with each token. Left early, the connection is closed."""
        connection = self._post(prompt, max_tokens=max_tokens, stream=True)
        try:
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    yield
        finally:
            connection.close()

    def ttft_ms(self, prompt: list[int]) -> float:
        """Milliseconds to the first token, of one."""
        return Client(self.server).ttft_ms(prompt)

    def tokens_per_s(self, random: Random, prompt_tokens: int) -> float:
        """Of a round of new requests that come together (benchmarks/throughput.py)."""
        return one_round(self.server, random, prompt_tokens)

    def _post(self, prompt: Sequence[int], **fields: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_DEADLINE_S)
        body = {
            "model": self.server.model,
            "prompt": list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection

    def empty_hbm(self) -> None:
        """The next hit comes from the store."""
        Client(self.server).empty_hbm()

    def loaded(self) -> dict[str, int]:
        """Tokens loaded so far, by tier."""
        self.ask([20, 21], 1)  # counts come with the step after
        metrics = self.server.metrics()
        return {tier: int(total(metrics, LOADED, tier=tier)) for tier in ("dram", "nvme")}

    def counted(self, name: str, **labels: str) -> int:
        return int(total(self.server.metrics(), name, **labels))

    def complaints(self) -> list[str]:
        """Warnings and errors of the store in the log, each once."""
        found = _lines(self.server.log, r"(?:WARNING|ERROR) .*(?:AttnStore|attnstore)")
        return [line for line in found if not line.startswith("Found endpoint plugin")]

    def facts(self) -> list[str]:
        """Lines of the log that say which backend, layout and runner it has."""
        text = self.server.log.read_text(errors="replace")
        found = (re.search(pattern, text) for pattern in FACTS)
        return [match[0] for match in found if match is not None]


def _number(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _candidates(found: dict[str, float]) -> LogProbs:
    """Best first."""
    pairs = ((_number(token), value) for token, value in found.items())
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))


def _lines(log: Path, pattern: str) -> list[str]:
    text = log.read_text(errors="replace")
    lines = (PREFIX.sub("", line) for line in text.splitlines() if re.search(pattern, line))
    return list(dict.fromkeys(line.strip()[:300] for line in lines))


def why_it_ended(text: str) -> str:
    """The line of a log that says why a server did not start, as far as one does."""
    found = re.findall(r"^.*?\b((?:\w+\.)*\w*(?:Error|Exception)\b: .+)$", text, re.MULTILINE)
    causes = [line for line in found if "Engine core init" not in line]
    last = " / ".join(line.strip() for line in text.strip().splitlines()[-3:])
    return (causes[-1] if causes else last or "it ended without a word")[:300]


@dataclass(frozen=True, slots=True)
class Setup:
    """The things that all servers of a run have in common."""

    size: Size
    work: Path
    model: Path
    is_cpu: bool
    cores: Sequence[int]
    connector: str | None
    """A module in `doubles`, in place of the connector."""
    logs: Path

    @contextmanager
    def serve(
        self,
        name: str,
        case: Case,
        deadline: Deadline,
        *,
        store: Path | None = None,
        hbm: int | None = None,
        extra: Sequence[str] = (),
        settings: dict[str, Any] | None = None,
        model: Path | None = None,
        model_len: int | None = None,
    ) -> Iterator[Served]:
        """A server of this case until the block is left.

        Args:
            name: of its log.
            store: its directory, or None for a server without the store.
            hbm: tokens that HBM has room for.
            settings: of the store, beside its directory.
        Raises: ServerError, Late.
        """
        blocks = (hbm or self.size.hbm) // (case.block_tokens or self.size.block)
        arguments = [
            "--max-model-len",
            str(model_len or self.size.model_len),
            "--dtype",
            "bfloat16",
            "--num-gpu-blocks-override",
            str(blocks),
            *case.arguments,
            *extra,
        ]
        environment = {"VLLM_SERVER_DEV_MODE": "1", **case.environment}
        if self.connector is not None:
            paths = [str(DOUBLES), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.is_cpu:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = self._bound(case.gpus)
        if store is not None:
            arguments += ["--kv-transfer-config", self._transfer(name, store, case, settings or {})]
        server = VllmServer(
            str(model or self.model),
            arguments,
            self.logs / f"{name}.log",
            environment=environment,
            start_deadline_s=deadline.seconds,  # of the case: it may compile a large model
        )
        with deadline.watches(server), server:
            try:
                yield Served(server)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServerError(
                    f"{type(error).__name__}: {error}\n{server.log_tail()}"
                ) from error

    def _bound(self, ranks: int) -> str:
        """One thread a core, the cores dealt out to the ranks."""
        return "|".join(",".join(map(str, self.cores[rank::ranks])) for rank in range(ranks))

    def _transfer(self, name: str, store: Path, case: Case, settings: dict[str, Any]) -> str:
        """A file of settings, as users write it; with a double, vLLM's own JSON."""
        nvme = {"path": str(store), "capacity": self.size.nvme, **settings.get("nvme", {})}
        own = {"dram": self.size.dram, "compute_if_sooner": False, "audit": "off"}
        ours = {**own, **settings, "nvme": nvme}
        if case.settings:
            ours["dram"] = {"size": ours["dram"], **case.settings}
        if self.connector is None:
            file = self.work / f"{name}.yaml"
            file.write_text(json.dumps(ours))  # which is YAML
            return str(file)
        return json.dumps(
            {
                "kv_connector": "Double",
                "kv_connector_module_path": self.connector,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": ours,
            }
        )
