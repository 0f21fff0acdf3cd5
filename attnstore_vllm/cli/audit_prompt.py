# SPDX-License-Identifier: Apache-2.0
"""`attnstore audit URL`: one prompt, always the same, whose stored KV the server compares with what
it computes.

The first time it leaves its KV. Each later time, after a restart or an upgrade, what the server
before has left is computed once more, and compared: the hint `audit: true` asks for that.
"""

from __future__ import annotations

import http.client
import json
import shlex
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from attnstore_vllm.cli.top import ANSWER_MAX, metrics_url, read
from attnstore_vllm.errors import AttnStoreError
from attnstore_vllm.prometheus import Metrics, total
from attnstore_vllm.types import AUDITS, Cause, Event

TIMEOUT_S = 120.0
PROMPT_TOKENS = 1024
MORE_TOKENS = 2
"""One is left to compute of any prompt, and one is generated."""
SALT = "attnstore audit"
SECTION = "attnstore"
"""The one of our hints and reports (hints.py)."""
NOT_STORED = ("prompt_tokens", "hbm_tokens", "moved_tokens", "computed_tokens")
"""Fields of a report that are no tier's."""
TOKEN_IDS = range(10, 200)
"""Every vocabulary has them."""
COMPARED_S = 15.0
"""The longest wait for the figures."""
POLL_S, EQUAL_LOOKS = 0.5, 6
"""Figures that stand still for so many looks, 3 s, are the last: an idle server's come once a
second."""
NEW = (Cause.NOT_STORED, Cause.EXPIRED, Cause.TOO_SHORT)
"""Nothing that could be compared was stored."""
FILES = (".yaml", ".yml", ".json")


class AuditError(AttnStoreError):
    """The server cannot be audited. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The end that the request came to."""

    prompt_tokens: int
    outcomes: dict[str, int]
    """Chunks, by AUDITS. Of others' requests too, that were audited at the same time."""
    is_stopped: bool
    """An audit has ended the serving of what is stored."""
    said: str

    @property
    def is_bad(self) -> bool:
        return self.outcomes[Event.DIFFERED] > 0 or self.is_stopped

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def audit(url: str, api_key: str | None = None) -> AuditVerdict:
    """Send the prompt, and wait for what the server finds. Raises: TopError, AuditError.

    Args:
        url: of the server, as `attnstore top` takes it.
    """
    if url.endswith(FILES) and "://" not in url:
        raise AuditError(
            f"{url} is a file, and an audit asks a running server: give its URL, as localhost:8000 "
            f"(`attnstore doctor {shlex.quote(url)}` looks at the settings)"
        )
    base = metrics_url(url).removesuffix("/metrics")
    model = _ask(f"{base}/v1/models", None, api_key)
    try:
        name, context = model["data"][0]["id"], int(model["data"][0].get("max_model_len") or 0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise AuditError(f"{base}/v1/models names no model") from error
    length = min(PROMPT_TOKENS + 1, (context or PROMPT_TOKENS + MORE_TOKENS) - 1)
    chance = Random(1)
    before = read(base)
    answer = _ask(
        f"{base}/v1/completions",
        {
            "model": name,
            "prompt": [chance.choice(TOKEN_IDS) for _ in range(length)],
            "max_tokens": 1,
            "temperature": 0.0,
            "cache_salt": SALT,
            "kv_transfer_params": {SECTION: {"audit": True, "report": True}},
        },
        api_key,
    )
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    report = params.get(SECTION) if isinstance(params, dict) else None
    if not isinstance(report, dict):
        raise AuditError(f"{base} says nothing of this prompt's KV; is AttnStore idle there?")
    why = report.get("why_computed")
    outcomes = {str(name): 0 for name in AUDITS}
    if why == Cause.AUDIT:
        outcomes = _outcomes(before, base, report.get("audited_chunks", 1))
    said = _said(report, why, outcomes)
    return AuditVerdict(length, outcomes, why == Cause.DISTRUSTED, said)


def _outcomes(before: Metrics, base: str, drawn: int) -> dict[str, int]:
    """Chunks that were compared since then, as soon as no more are.

    Args:
        drawn: chunks of this prompt. Of which nothing is told in time was not compared.
    """
    deadline, last, equal = time.monotonic() + COMPARED_S, -1, 0
    while True:
        now = read(base)
        grown = {
            str(name): int(
                total(now, "vllm:attnstore_audits_total", outcome=name)
                - total(before, "vllm:attnstore_audits_total", outcome=name)
            )
            for name in AUDITS
        }
        count = sum(grown.values())
        equal = equal + 1 if count == last else 0
        if (count >= drawn and equal >= EQUAL_LOOKS) or time.monotonic() > deadline:
            grown[Event.NOT_COMPARED] += max(0, drawn - count)
            return grown
        last = count
        time.sleep(POLL_S)


def _said(report: dict[str, Any], why: object, outcomes: dict[str, int]) -> str:
    agreed, differed, lost = (outcomes[name] for name in AUDITS)
    rest = f"; {lost} could not be compared" if lost else ""
    if differed:
        said = f"{differed} chunks differ from what the model computes, {agreed} agree{rest}"
        return f"{said}. See the server's log, and AttnStoreWrongKv in docs/runbook.md"
    if agreed:
        return f"{agreed} chunks are what the model computes{rest}"
    if why == Cause.AUDIT:
        return f"nothing could be compared ({lost} chunks were gone, or had no room)"
    if why == Cause.DISTRUSTED:
        return (
            "an audit has found wrong KV before: the server serves and stores nothing, so there "
            "was nothing to compare. AttnStoreWrongKv in docs/runbook.md says what to do"
        )
    if report.get("hbm_tokens"):
        return "vLLM's own cache has it: nothing was compared. Ask again after a restart"
    tokens = {name for name in report if name.endswith("_tokens")} - set(NOT_STORED)
    if any(report[name] for name in tokens):
        return "it was served from the store, and not compared: the server's `audit` is off"
    if why not in NEW:
        return f"nothing was compared ({why}): docs/runbook.md has the causes"
    if (why_not := report.get("why_not_stored")) is not None:
        return f"nothing was stored of it ({why}), nor is it now ({why_not})"
    return f"nothing was stored of it ({why}). It is now: ask again after a restart"


def _ask(address: str, body: dict[str, Any] | None, api_key: str | None) -> Any:
    """Raises: AuditError."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read(ANSWER_MAX))
    except urllib.error.HTTPError as error:
        raise AuditError(f"{address} answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise AuditError(f"{address} does not answer: {reason}") from error
