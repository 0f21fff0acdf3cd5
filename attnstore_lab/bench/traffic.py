# SPDX-License-Identifier: Apache-2.0
"""Where prompt tokens came from and what was moved, read from /metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from attnstore_vllm.prometheus import Metrics, total

_STORE: Final = "vllm:attnstore_"
_TIER_NAMES: Final = {"dram": "DRAM", "nvme": "NVMe"}
_OTHERS_NAMES: Final = {"peers": "siblings", "shared": "shared"}
"""Other engines: named where there was something, since most servers have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counters of one server between two looks at its /metrics.

    `prompt_tokens` is by source, "computed" and "HBM" and, with the store, "DRAM" and "NVMe"
    (where the KV was when its request came), "siblings" and "shared"; "other" is what another
    connector brought. The other fields are empty, or 0, for a server without the store.
    """

    prompt_tokens: dict[str, int]
    moved_bytes: dict[str, int]
    chunks: dict[str, int]
    recomputations: dict[str, int]
    loads: int
    load_seconds: float

    @property
    def has_store(self) -> bool:
        return "DRAM" in self.prompt_tokens

    def share(self, source: str) -> float:
        """The part of all prompt tokens that came from there, 0 to 1."""
        return self.prompt_tokens.get(source, 0) / max(1, sum(self.prompt_tokens.values()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def traffic(before: Metrics, after: Metrics) -> Traffic:
    """The difference between two looks at the same server."""

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    def by_label(name: str, label: str) -> dict[str, int]:
        """The values of a counter of the store, by the values of one label."""
        full = f"{_STORE}{name}_total"
        seen = {v for (n, labels), _ in after.items() if n == full for k, v in labels if k == label}
        return {value: int(grown(full, **{label: value})) for value in sorted(seen)}

    def tokens(source: str) -> int:
        return int(grown("vllm:prompt_tokens_by_source_total", source=source))

    loaded = by_label("loaded_tokens", "tier")
    prompt_tokens = {"computed": tokens("local_compute"), "HBM": tokens("local_cache_hit")}
    prompt_tokens |= {name: loaded[tier] for tier, name in _TIER_NAMES.items() if tier in loaded}
    prompt_tokens |= {name: loaded[t] for t, name in _OTHERS_NAMES.items() if loaded.get(t)}
    # A preempted request loads twice, so the store may have loaded more than vLLM counts.
    if (other := tokens("external_kv_transfer") - sum(loaded.values())) > 0:
        prompt_tokens["other"] = other
    return Traffic(
        prompt_tokens=prompt_tokens,
        moved_bytes=by_label("bytes", "direction"),
        chunks=by_label("chunks", "event") | by_label("errors", "kind"),
        recomputations=by_label("recomputations", "cause"),
        loads=int(grown(f"{_STORE}load_seconds_count")),
        load_seconds=grown(f"{_STORE}load_seconds_sum"),
    )
