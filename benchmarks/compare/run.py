# SPDX-License-Identifier: Apache-2.0
"""One server after the other, the same questions to each; whatever happens, they are ended."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from attnstore_lab.bench.client import RequestError, RequestSettings, open_http
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.records import TurnRecord
from attnstore_lab.bench.replay import ReplayOutcome, replay
from attnstore_lab.bench.schedule import Load
from attnstore_lab.bench.talk import Talk
from attnstore_lab.bench.tokens import as_ids, fitting
from attnstore_vllm.prometheus import Metrics
from benchmarks.compare.figures import Figures, figures, ratios
from benchmarks.compare.steps import parse_steps
from benchmarks.compare.systems import System
from benchmarks.server import ServerError

WARM_UP_USE: Final = 1 << 20
"""A conversation that warms up begins as none of the load does."""
WARM_UP_TURNS: Final = 2


class Running(Protocol):
    """A server that runs; bench/server.py has the real one."""

    base_url: str
    log: Path

    def metrics(self) -> Metrics: ...


Start = Callable[[System, Path, Path], AbstractContextManager[Running]]
"""Of a system, an empty directory of its own and a log. Raises ServerError on entering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every server is asked.

    Args:
        step_times: the server's log says how long the accelerator was busy with each step.
    """

    conversations: Sequence[Conversation]
    load: Load
    settings: RequestSettings
    max_concurrency: int | None = None
    step_times: bool = True


@dataclass(slots=True)
class Comparison:
    """What came of it, in the order in which the systems ran.

    Args:
        not_run: by name, why.
        interrupted: the last systems were not run; one that was cut off is not in it.
    """

    figures: dict[str, Figures] = field(default_factory=dict)
    summaries: dict[str, Any] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    num_conversations: int = 0
    interrupted: bool = False

    @property
    def num_failed(self) -> int:
        return sum(f.failed for f in self.figures.values())

    def to_json(self) -> dict[str, Any]:
        relative = ratios(self.figures)
        return {
            "conversations": self.num_conversations,
            "interrupted": self.interrupted,
            "systems": {
                name: {
                    "figures": found.to_json(),
                    "ratios": relative[name],
                    "summary": self.summaries[name],
                }
                for name, found in self.figures.items()
            },
            "not_run": self.not_run,
        }


class Comparer:
    """Runs a comparison; must be used in the main thread, for its signals.

    Args:
        out: directory of logs and records; what had their names is replaced.
        scratch: directory that gets a new one for each server's KV, which is removed after it.
        tell: is told what begins.
        keep: gets what there is after each system that ran to its end.
    """

    def __init__(
        self,
        asked: Asked,
        start: Start,
        *,
        out: Path,
        scratch: Path,
        tell: Callable[[str], None] = lambda _: None,
        keep: Callable[[Comparison], object] = lambda _: None,
        progress: bool = True,
    ) -> None:
        self._asked = asked
        self._start = start
        self._out = out
        self._scratch = scratch
        self._tell = tell
        self._keep = keep
        self._progress = progress
        self._chosen: list[Conversation] | None = None
        self.result = Comparison()

    def run(self, systems: Sequence[System], not_run: dict[str, str]) -> Comparison:
        """Run those of the systems that can be.

        A server that does not start, or dies, or whose records cannot be written, is told among
        those that were not run. Raises: ServerError, RequestError or OSError if none has run
        before it, since then none will do better; ConfigError.
        """
        self.result.not_run |= not_run
        here = [system for system in systems if system.name not in not_run]
        for number, system in enumerate(here, 1):
            self._tell(f"{number}/{len(here)}  {system.name}: {system.words}")
            try:
                self._one(system)
                if not self.result.interrupted:
                    self._keep(self.result)
            except KeyboardInterrupt:
                self.result.interrupted = True
            except (ServerError, RequestError, OSError) as error:
                if not self.result.figures:
                    raise
                self.result.not_run[system.name] = str(error)
                self._tell(f"     {str(error).splitlines()[0]}")
            if self.result.interrupted:
                break
        return self.result

    def _one(self, system: System) -> None:
        self._scratch.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f"kv-{system.name}-", dir=self._scratch)).resolve()
        try:
            with self._start(system, directory, self._out / f"{system.name}.log") as server:
                self._tell(f"     up; log: {server.log}")
                asyncio.run(self._measure(system, server))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _measure(self, system: System, server: Running) -> None:
        asked = self._asked
        if self._chosen is None:
            self._chosen = await self._choose(server.base_url)
        await self._warm_up(server.base_url, self._chosen)
        before, position = server.metrics(), server.log.stat().st_size
        records = self._out / f"{system.name}.jsonl"
        outcome = await replay(
            server.base_url,
            self._chosen,
            asked.load,
            asked.settings,
            max_concurrency=asked.max_concurrency,
            records=records,
            progress=self._progress,
        )
        if outcome.interrupted:
            self.result.interrupted = True
            return
        if outcome.trouble:
            raise OSError(outcome.trouble)
        self._note(system, server, outcome, before, position, records)

    def _note(
        self,
        system: System,
        server: Running,
        outcome: ReplayOutcome,
        before: Metrics,
        position: int,
        records: Path,
    ) -> None:
        after = server.metrics()
        with server.log.open(errors="replace") as log:
            log.seek(position)
            steps = parse_steps(log) if self._asked.step_times else []
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        self.result.figures[system.name] = figures(
            lines, before, after, steps, own_history=self._asked.settings.history == "own"
        )
        self.result.summaries[system.name] = outcome.to_json()

    async def _choose(self, url: str) -> list[Conversation]:
        """The conversations that fit the context, as the API wants them. Once, for all servers.

        Raises: RequestError if there is none.
        """
        asked = self._asked
        conversations = list(asked.conversations)
        if asked.settings.api == "completions":
            conversations = await as_ids(url, conversations, asked.settings)
        fit = await fitting(url, conversations, asked.settings, turns=asked.load.turns)
        if not fit:
            raise RequestError(
                f"none of {len(conversations)} conversations fits the model's context; try a "
                "larger --max-model-len, or --turns"
            )
        self._tell(f"     {len(fit)} of {len(conversations)} conversations fit the context")
        self.result.num_conversations = len(fit)
        return fit

    async def _warm_up(self, url: str, conversations: Sequence[Conversation]) -> None:
        """The first requests of a server are slow. Raises: RequestError if one fails."""
        settings = replace(self._asked.settings, max_tokens=8)
        several = [c for c in conversations if len(c.questions) >= WARM_UP_TURNS]
        talk = Talk((several or conversations)[0], settings, WARM_UP_USE)
        async with open_http(settings) as http:
            for turn in range(WARM_UP_TURNS if several else 1):
                record = TurnRecord(conversation_id="warm-up", turn=turn + 1)
                await talk.ask(http, url, turn, record)
                if record.error is not None:
                    raise RequestError(f"the server does not answer: {record.error}")
