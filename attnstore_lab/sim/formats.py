# SPDX-License-Identifier: Apache-2.0
"""Trace files, by what is in them (docs/simulate.md has an example of each):

- *requests*, as Mooncake published them: a JSON object a line with timestamp, input_length,
  output_length and hash_ids. A server's own (setting `trace`) have a first line that says how many
  tokens a hash stands for, and known_length: the tokens, of answers too, that hash_ids stand for;
- *sessions*: a JSON object a line with its requests, their times from the session's start and
  their block hashes as runs. Sessions begin at random times (Poisson);
- *conversations*, in ShareGPT format: texts only. They begin at random times too, and between
  an answer and the next question there is a time to think (log-normal). A token is four letters.

Files may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from attnstore_lab.sim.trace import Trace, TraceError, TraceRequest, make_trace

SESSION_STRIDE = 1 << 32
"""Chunks of different sessions are different ones: their numbers lie so far apart."""
MAIN: Mapping[str, str] = {"session": "main"}
"""The agent that a session begins with; those that it begins are its children."""
IDS = frozenset({"session", "parent"})
TURN_TOKENS = 4
"""That a chat template puts around the text of a turn."""
LETTERS_A_TOKEN = 4
ANSWER_TOKENS_S = 30.0
"""How fast answers come, for when the next question follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The times that a file without them needs.

    Args:
        sessions_s: that begin in a second.
        num_sessions: drawn from the file, again and again if it has fewer; None: each once.
        think_s: median of the time between an answer and the next question.
    """

    sessions_s: float = 0.2
    num_sessions: int | None = None
    think_s: float = 60.0
    seed: int = 1


def read_trace(
    path: Path, arrivals: Arrivals, block_tokens: int | None = None, chunk_tokens: int = 256
) -> Trace:
    """Read a file in any of the formats.

    Args:
        block_tokens: that a hash in a file of requests stands for; 512 if it is not given.
        chunk_tokens: where the file leaves the choice.
    Raises: TraceError, naming file and line.
    """
    text = _text(path)
    if text.lstrip().startswith("["):
        return _conversations(path, text, arrivals, chunk_tokens)
    lines = _Lines(path, text)
    first = next(iter(lines), None)
    if first is None:
        raise TraceError(f"{path}: it is empty; a trace was expected")
    if isinstance(first[1], dict) and "requests" in first[1]:
        return _sessions(path, lines, arrivals, chunk_tokens)
    if isinstance(first[1], dict) and "attnstore_trace" in first[1]:
        own = _get(first[0], first[1], "block_tokens", _is_size, "a number of tokens")
        return _requests(path, list(lines)[1:], own)
    return _requests(path, lines, block_tokens or 512)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: neither text nor whole gzip data: {error}") from error


@dataclass(frozen=True, slots=True)
class _Lines:
    """(where, what is there), a JSON value a line; empty lines are passed over."""

    path: Path
    text: str

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(self.text.split("\n"), 1):
            if line.strip():
                where = f"{self.path}, line {number}"
                try:
                    yield where, json.loads(line)
                except ValueError as error:
                    raise TraceError(f"{where}: not JSON: {error}") from error


def _get(where: str, entry: Any, name: str, kind: Callable[[Any], bool], expected: str) -> Any:
    if not isinstance(entry, dict):
        raise TraceError(f"{where}: an object with {name!r} was expected, not {_short(entry)}")
    value = entry.get(name)
    if not kind(value):
        found = _short(value) if name in entry else "nothing"
        raise TraceError(f"{where}: {name!r} is {found}; expected {expected}")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12


def _is_hashes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and 0 <= item < 1 << 63 for item in value
    )


def _requests(path: Path, lines: Iterable[tuple[str, Any]], block_tokens: int) -> Trace:
    found = []
    for where, entry in lines:
        timestamp = _get(where, entry, "timestamp", _is_time, "milliseconds")
        num_tokens = _get(where, entry, "input_length", _is_count, "a number of tokens")
        answer = _get(where, entry, "output_length", _is_count, "a number of tokens")
        hashes = _get(where, entry, "hash_ids", _is_hashes, "a list of block hashes")
        given = {"known_length": num_tokens, **entry}
        known = _get(where, given, "known_length", _is_count, "a number of tokens")
        if len(hashes) != -(-known // block_tokens) or not 0 < num_tokens <= known:
            raise TraceError(
                f"{where}: {len(hashes)} hashes for {known} tokens; expected "
                f"{-(-known // block_tokens)}, one for each {block_tokens} tokens "
                "(--block-tokens)"
            )
        found.append(
            TraceRequest(timestamp / 1000, np.array(hashes, np.int64), num_tokens, answer, known)
        )
    return make_trace(path.name, block_tokens, found)


# ---- sessions -----------------------------------------------------------------------------------


def _sessions(path: Path, lines: _Lines, arrivals: Arrivals, chunk_tokens: int) -> Trace:
    sessions = [
        list(_session(where, entry, chunk_tokens)) for where, entry in lines
    ]  # all are read before one is drawn: a bad line is always found
    found = []
    for number, (start_s, session) in enumerate(_begin([s for s in sessions if s], arrivals)):
        for request in session:
            chunks, at = request.chunks + number * SESSION_STRIDE, start_s + request.arrival_s
            ids = {k: f"{number}/{request.told[k]}" for k in request.told.keys() & IDS}
            told = {**request.told, **ids}
            found.append(replace(request, arrival_s=at, chunks=chunks, told=told))
    return make_trace(path.name, chunk_tokens, found)


def _session(where: str, entry: Any, chunk_tokens: int) -> Iterator[TraceRequest]:
    block_tokens = _get(where, entry, "block_size", _is_count, "a number of tokens")
    if not block_tokens or chunk_tokens % block_tokens:
        raise TraceError(f"{where}: blocks of {block_tokens} tokens do not divide {chunk_tokens}")
    yield from _requests_of(where, entry, block_tokens, chunk_tokens)


def _requests_of(
    where: str,
    entry: Any,
    block_tokens: int,
    chunk_tokens: int,
    since_s: float = 0.0,
    whose: Mapping[str, str] = MAIN,
) -> Iterator[TraceRequest]:
    """Args: whose: session, and parent if it has one."""
    is_list = "a list of requests"
    requests = _get(where, entry, "requests", lambda value: isinstance(value, list), is_list)
    own = [n for n, one in enumerate(requests) if not (isinstance(one, dict) and "requests" in one)]
    for number, request in enumerate(requests):
        here = f"{where}, request {number}"
        if isinstance(request, dict) and "requests" in request:  # of another agent
            # Its requests count from its own beginning, and that from the session's.
            begun_s = _get(here, {"t": 0.0, **request}, "t", _is_time, "seconds")
            child = {"session": f"{whose['session']}/{number}", "parent": whose["session"]}
            sizes = block_tokens, chunk_tokens
            yield from _requests_of(here, request, *sizes, since_s + begun_s, child)
            continue
        time_s = since_s + _get(here, request, "t", _is_time, "seconds")
        num_tokens = _get(here, request, "in", _is_count, "a number of tokens")
        answer = _get(here, request, "out", _is_count, "a number of tokens")
        runs = _get(here, request, "hash_rle", _is_runs, "a list of [first, count]")
        blocks = [np.arange(first, first + count, dtype=np.int64) for first, count in runs]
        every = chunk_tokens // block_tokens
        chunks = np.concatenate([np.empty(0, np.int64), *blocks])[every - 1 :: every]
        if len(chunks):
            known = len(chunks) * chunk_tokens
            told = {**whose, **_told(entry, request), "ended": number == own[-1]}
            yield TraceRequest(time_s, chunks, max(num_tokens, known), answer, known, told=told)


def _told(entry: Any, request: Any) -> dict[str, str]:
    """The kind of agent, and whether a tool has answered it. No file names the tools."""
    asked = "result" if "tool_result" in str(request.get("input_types")) else "words"
    return {"agent": str(entry.get("subagent_type", request.get("model"))), "tool": asked}


def _is_runs(value: Any) -> bool:
    return isinstance(value, list) and all(
        _is_hashes(run) and len(run) == 2 and run[1] < 1 << 24 and run[0] < SESSION_STRIDE // 2
        for run in value
    )


# ---- conversations ------------------------------------------------------------------------------


def _conversations(path: Path, text: str, arrivals: Arrivals, chunk_tokens: int) -> Trace:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from error
    conversations = [
        list(_turns(f"{path}, conversation {n}", entry)) for n, entry in enumerate(entries)
    ]
    rng = Random(arrivals.seed)
    found = []
    for number, (now_s, turns) in enumerate(_begin([c for c in conversations if c], arrivals)):
        time_s, num_tokens, think_s = now_s, 0, 0.0
        for question, answer in turns:
            num_tokens += question
            count = -(-(num_tokens + answer) // chunk_tokens)
            chunks = np.arange(count, dtype=np.int64) + number * SESSION_STRIDE
            known = num_tokens + answer
            found.append(TraceRequest(time_s, chunks, num_tokens, answer, known, number, think_s))
            num_tokens = known
            think_s = arrivals.think_s * rng.lognormvariate(0, 1)
            time_s += answer / ANSWER_TOKENS_S + think_s
    return make_trace(path.name, chunk_tokens, found)


def _turns(where: str, entry: Any) -> Iterator[tuple[int, int]]:
    """(tokens of the question, tokens of the answer)"""
    expected = "a list of turns"
    turns = _get(where, entry, "conversations", lambda value: isinstance(value, list), expected)
    question = 0
    for number, turn in enumerate(turns):
        here = f"{where}, turn {number}"
        speaker = _get(here, turn, "from", lambda value: isinstance(value, str), "who speaks")
        value = _get(here, turn, "value", lambda value: isinstance(value, str), "a text")
        tokens = len(value) // LETTERS_A_TOKEN + TURN_TOKENS
        if speaker.lower() not in ("gpt", "assistant", "chatgpt", "bing", "bard"):
            question += tokens
        elif question:
            yield question, tokens
            question = 0
    if question:
        yield question, TURN_TOKENS


def _begin(sessions: list[Any], arrivals: Arrivals) -> Iterator[tuple[float, Any]]:
    """When each session begins. As many as were asked for, drawn with replacement; or each once."""
    rng = Random(arrivals.seed)
    now_s = 0.0
    wanted = arrivals.num_sessions
    if not sessions:
        return
    drawn = sessions if wanted is None else (rng.choice(sessions) for _ in range(wanted))
    for session in drawn:
        yield now_s, session
        now_s += rng.expovariate(arrivals.sessions_s)
