# SPDX-License-Identifier: Apache-2.0
"""Times between the questions of real sessions, from a trace that has sessions.

Two kinds of trace, a JSON object a line, compressed with gzip or not:

    {"requests": [{"t": 0.0}, {"t": 19.0, "think_time": 12.0}, ...]}        one session a line
    {"session": 17, "turn": 1, "timestamp": 1730409393}                     one request a line

Times are seconds. Nothing else of the trace is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from attnstore_lab.bench.conversations import DatasetError, is_seconds, read_bytes


def read_gaps(path: Path, *, thinks: bool) -> list[tuple[float, ...]]:
    """The gaps of each session that has one, in seconds.

    Args:
        thinks: take "think_time", from an answer to the next question, of the requests that have
            it. Else a gap is from one question to the next.
    Raises: DatasetError, naming file and line.
    """
    sessions: dict[Any, list[float]] = {}
    by_line: list[tuple[float, ...]] = []
    for where, entry in _entries(path):
        if isinstance(entry.get("requests"), list):
            by_line.append(tuple(_of_session(where, entry["requests"], thinks)))
        elif "session" in entry:
            sessions.setdefault(entry["session"], []).append(_seconds(where, entry, "timestamp"))
        else:
            raise DatasetError(f'{where}: "requests", or "session" and "timestamp" are expected')
    for times in sessions.values():
        times.sort()
        by_line.append(tuple(b - a for a, b in pairwise(times)))
    gaps = [session for session in by_line if session]
    if not gaps:
        raise DatasetError(f"{path}: no session of it has a second request")
    return gaps


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{where}: not JSON: {error}") from error
            if not isinstance(entry, dict):
                raise DatasetError(f"{where}: an object is expected")
            yield where, entry


def _of_session(where: str, requests: list[Any], thinks: bool) -> Iterator[float]:
    last_s = None
    for n, request in enumerate(requests):
        here = f"{where}, request {n}"
        if not isinstance(request, dict):
            raise DatasetError(f"{here}: an object is expected")
        if "requests" in request:  # of another agent, beside the session's own
            continue
        time_s = _seconds(here, request, "t")
        if last_s is not None:
            think = thinks and "think_time" in request
            yield _seconds(here, request, "think_time") if think else max(0.0, time_s - last_s)
        last_s = time_s


def _seconds(where: str, entry: dict[str, Any], name: str) -> float:
    value = entry.get(name)
    if not is_seconds(value):
        raise DatasetError(f"{where}: {name!r} is {value!r}; expected seconds")
    return float(value)
