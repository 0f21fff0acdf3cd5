# SPDX-License-Identifier: Apache-2.0
"""One replay from beginning to end: records into a file as they come, a summary, a bar."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnstore_lab.bench.client import RequestSettings
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.open_loop import OpenLoop
from attnstore_lab.bench.records import TurnRecord
from attnstore_lab.bench.schedule import Load, Plan, make_plan
from attnstore_lab.bench.summary import Summary
from attnstore_lab.bench.talk import Talk
from attnstore_lab.progress import progress as shown_progress


@dataclass(slots=True)
class ReplayOutcome:
    """The outcome of a replay.

    Args:
        interrupted: by SIGINT or SIGTERM; what there is was recorded.
        trouble: why records could not be written any more; the replay ended there.
    """

    plan: Plan
    summary: Summary = field(default_factory=Summary)
    interrupted: bool = False
    trouble: str | None = None

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return self.summary.to_json() | {
            "interrupted": self.interrupted,
            "planned": {
                "sessions": plan.num_sessions,
                "requests": plan.num_requests,
                "warmup": plan.num_warmup,
                "last_due_s": round(plan.last_due_s, 3),
            },
        }


def forecast(plan: Plan, *, after_answer: bool) -> str:
    """How long the replay will take at least, before anything is asked."""
    begins = "at the earliest " if after_answer else ""
    return (
        f"{plan.num_requests:,} requests of {plan.num_sessions:,} sessions; the last is due "
        f"{begins}after {_duration(plan.last_due_s)}. Fewer: --sessions, --turns, --duration; "
        "sooner: --rate, --think. Ctrl-C ends it and prints what there is."
    )


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


async def replay(
    base_url: str,
    conversations: Sequence[Conversation],
    load: Load,
    settings: RequestSettings,
    *,
    max_concurrency: int | None = None,
    records: Path | None = None,
    answers: bool = False,
    progress: bool = True,
) -> ReplayOutcome:
    """Ask all that the load asks for; must run in the main thread, for its signals.

    Memory: the conversations, the sessions under way, and some 2 MB for each row of the summary.

    Args:
        records: a file that gets a line for each request when it ends; what it had is lost.
        answers: with what was answered.
        progress: say on stderr how long it will take, and how far it is.
    Raises: ConfigError, OSError if the file cannot be opened.
    """
    for conversation in conversations:
        Talk(conversation, settings)  # refuses ids for chat, before anything is sent
    outcome = ReplayOutcome(make_plan(conversations, load))
    if progress:
        print(forecast(outcome.plan, after_answer=load.after_answer), file=sys.stderr, flush=True)
    with ExitStack() as stack:
        file = None
        if records is not None:
            # Not buffered: a full disk says so at once, and not again when the file is closed.
            file = stack.enter_context(records.open("wb", buffering=0))
        bar = stack.enter_context(
            shown_progress("replay", outcome.plan.num_requests, is_shown=progress)
        )

        def emit(record: TurnRecord) -> None:
            outcome.summary.add(record)
            if file is not None:
                file.write(json.dumps(record.to_json(texts=answers)).encode() + b"\n")
            failed = outcome.summary.num_failed
            bar.what = f"replay, {loop.num_asking} under way, {failed} failed"
            bar.step()

        loop = OpenLoop(
            base_url,
            conversations,
            load,
            outcome.plan,
            settings,
            emit,
            max_concurrency=max_concurrency,
        )
        running = asyncio.ensure_future(loop.run())
        with _cancelled_by_signals(running, outcome):
            try:
                await running
            except asyncio.CancelledError:
                if not outcome.interrupted:
                    raise
            except OSError as error:  # those of requests are records: this is the file
                outcome.trouble = f"{records}: {error.strerror or error}"
    return outcome


@contextmanager
def _cancelled_by_signals(running: asyncio.Future[None], outcome: ReplayOutcome) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the replay in order; a second one ends the program."""
    loop = asyncio.get_running_loop()
    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in both}

    def restore() -> None:
        for number in both:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])

    def stop() -> None:
        restore()
        outcome.interrupted = True
        running.cancel()

    for number in both:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        if not outcome.interrupted:
            restore()
