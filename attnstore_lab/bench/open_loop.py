# SPDX-License-Identifier: Apache-2.0
"""Sessions that begin when they are due, however slow the server is.

A request waits for two things only: for the answer before it in its session, and for the limit
of concurrent requests. Both are recorded, and so is what this program itself was late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from attnstore_lab.bench.client import RequestSettings, open_http
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.records import TurnRecord
from attnstore_lab.bench.schedule import Load, Plan, Session, sessions
from attnstore_lab.bench.talk import Talk


class OpenLoop:
    """One run. What is kept are the sessions that have begun and not ended.

    Args:
        plan: of the same conversations and load.
        max_concurrency: at most so many requests at a time; None: no limit.
        emit: is called with each record, in the order in which requests end. A request that is
            interrupted is recorded too; turns that a failure made impossible have an error and
            were not sent.
    """

    def __init__(
        self,
        base_url: str,
        conversations: Sequence[Conversation],
        load: Load,
        plan: Plan,
        settings: RequestSettings,
        emit: Callable[[TurnRecord], None],
        *,
        max_concurrency: int | None = None,
    ) -> None:
        self._base_url = base_url
        self._conversations = conversations
        self._load = load
        self._plan = plan
        self._settings = settings
        self._emit = emit
        self._limit = asyncio.Semaphore(max_concurrency or plan.num_requests)
        self._origin_s = 0.0
        self.num_asking = 0
        """Requests under way."""

    async def run(self) -> None:
        """Until all have ended. If it is cancelled, so are the requests under way."""
        tasks: set[asyncio.Task[None]] = set()
        bugs: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (bug := task.exception()) is not None:
                bugs.append(bug)

        async with open_http(self._settings) as http:
            self._origin_s = time.perf_counter()
            try:
                for session in sessions(self._conversations, self._load):
                    await self._until(session.start_s)
                    if bugs:
                        raise bugs[0]
                    task = asyncio.create_task(self._hold(http, session))
                    tasks.add(task)
                    task.add_done_callback(ended)
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _now(self) -> float:
        return time.perf_counter() - self._origin_s

    async def _until(self, due_s: float) -> None:
        # At least once, so that a schedule that is behind does not keep out what is under way.
        await asyncio.sleep(due_s - self._now())

    async def _hold(self, http: aiohttp.ClientSession, session: Session) -> None:
        conversation = self._conversations[session.conversation]
        talk = Talk(conversation, self._settings, session.use)
        name = f"{conversation.id}#{session.use + 1}" if session.use else conversation.id
        answered_s = 0.0
        for turn, planned_s in enumerate(session.due_s):
            record = TurnRecord(conversation_id=name, turn=turn + 1, session=session.number)
            record.warmup = self._plan.warms_up(planned_s, session.number, turn)
            record.error = talk.why_over
            if record.error is None:
                due_s = planned_s
                if self._load.after_answer and turn > 0:
                    due_s = answered_s + session.thinks_s[turn - 1]
                await self._ask(http, talk, turn, record, due_s, answered_s)
                answered_s = self._now()
            self._emit(record)

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        talk: Talk,
        turn: int,
        record: TurnRecord,
        due_s: float,
        answered_s: float,
    ) -> None:
        """Wait until the request may be sent, and send it. All times from the run's start."""
        await self._until(due_s)
        ready_s = self._now()
        async with self._limit:
            record.due_ms = due_s * 1e3
            record.wait_answer_ms = max(0.0, answered_s - due_s) * 1e3
            record.wait_limit_ms = (self._now() - ready_s) * 1e3
            self.num_asking += 1
            try:
                await talk.ask(http, self._base_url, turn, record, self._origin_s)
            except asyncio.CancelledError:
                self._emit(record)
                raise
            finally:
                self.num_asking -= 1
