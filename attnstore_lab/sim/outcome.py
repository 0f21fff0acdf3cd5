# SPDX-License-Identifier: Apache-2.0
"""The outcome of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

QUANTILES = (50, 90, 99)


@dataclass(slots=True)
class Outcome:
    """Figures of the requests after the warm-up. Tokens, seconds, bytes."""

    policy: str
    num_requests: int = 0
    prompt_tokens: int = 0
    history_tokens: int = 0
    """Tokens of prompts that were prompt or answer of the conversation before."""
    found_history: int = 0
    hbm_tokens: int = 0
    dram_tokens: int = 0
    """Loaded, and in DRAM when the request was first offered a place ..."""
    nvme_tokens: int = 0
    """... or on NVMe then."""
    wanted_tokens: int = 0
    """Stored when the request was first offered a place, and not in HBM."""
    ready_tokens: int = 0
    """Those of `wanted_tokens` that were in DRAM then."""
    queued_wanted_tokens: int = 0
    """As `wanted_tokens`, of requests that had waited for a second or more ..."""
    queued_ready_tokens: int = 0
    """... and as `ready_tokens`: what the queue gave the time to bring up."""
    stored_history: int = 0
    """Tokens of the history that were stored anywhere when the request was first offered a
    place."""
    waited_s: float = 0.0
    """That requests waited for KV while there was a place for them."""
    busy_s: float = 0.0
    """Seconds that the accelerator computed."""
    prefill_s: float = 0.0
    """Seconds of `busy_s` that went into prompts: stored KV can save these."""
    duration_s: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    by_group: Counter[str] = field(default_factory=Counter)
    """By kind of KV cache group, of the whole run: scheduler/messages.py: GroupCounts."""
    ttft_s: list[float] = field(default_factory=list)
    later_ttft_s: list[float] = field(default_factory=list)
    """TTFT of requests that continue a conversation."""
    sessions: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When each session's first request came, and its last answer ended, so far."""
    first_ttft_s: list[float] = field(default_factory=list)
    """TTFT of requests that begin one."""
    gave_up_at_s: float | None = None
    """When a request had waited for longer than clients do: the run ended there, and its times say
    nothing of a server that serves the load."""

    @property
    def is_served(self) -> bool:
        return self.gave_up_at_s is None

    @property
    def hit_tokens(self) -> int:
        return self.hbm_tokens + self.dram_tokens + self.nvme_tokens

    @property
    def hit_tokens_share(self) -> float:
        return _share(self.hit_tokens, self.prompt_tokens)

    @property
    def history_hit_share(self) -> float:
        return _share(self.found_history, self.history_tokens)

    @property
    def dram_share(self) -> float:
        """The part of what was loaded that was in DRAM when it was first asked for."""
        return _share(self.dram_tokens, self.dram_tokens + self.nvme_tokens)

    @property
    def ready_share(self) -> float:
        """The part of all that was stored and wanted that was in DRAM then."""
        return _share(self.ready_tokens, self.wanted_tokens)

    @property
    def queued_ready_share(self) -> float:
        return _share(self.queued_ready_tokens, self.queued_wanted_tokens)

    @property
    def stored_history_share(self) -> float:
        return _share(self.stored_history, self.history_tokens)

    @property
    def session_s(self) -> float:
        """How long a session takes on the mean, with the times between its turns."""
        spans = [end - begin for begin, end in self.sessions.values()]
        return float(np.mean(spans)) if spans else 0.0

    def ttft(self, percent: float) -> float:
        return float(np.percentile(self.ttft_s, percent)) if self.ttft_s else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "requests": self.num_requests,
            **({} if self.is_served else {"cannot_serve_after_s": self.gave_up_at_s}),
            "hit_tokens_share": self.hit_tokens_share,
            "history_hit_share": self.history_hit_share,
            "hit_tokens": {
                "hbm": self.hbm_tokens,
                "dram": self.dram_tokens,
                "nvme": self.nvme_tokens,
            },
            "dram_share": self.dram_share,
            "ready_share": self.ready_share,
            "queued_ready_share": self.queued_ready_share,
            "stored_history_share": self.stored_history_share,
            "waited_s": round(self.waited_s, 3),
            "ttft_s": _quantiles(self.ttft_s if self.is_served else ()),
            "ttft_s_of_later_turns": _quantiles(self.later_ttft_s if self.is_served else ()),
            "accelerator_s": round(self.busy_s, 3),
            "prefill_s": round(self.prefill_s, 3),
            "duration_s": round(self.duration_s, 3),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            **({"by_group": dict(sorted(self.by_group.items()))} if self.by_group else {}),
        }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{q}": round(float(np.percentile(seconds, q)), 6) for q in QUANTILES}
