# SPDX-License-Identifier: Apache-2.0
"""The description of its KV tensors that a worker gives the scheduler side, once, through the pool.

The fields of KvFacts decide what the bytes are: all of them go into the namespace, whichever they
are, so a new one cannot be forgotten. Those of RankDescription say how the rank works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

REASON_MAX = 500
"""Characters of a reason: PyTorch's messages are longer than the place that a rank has."""


@dataclass(frozen=True, slots=True)
class KvFacts:
    """Facts about the first layer's tensor, which stands for all that are of its kind."""

    device: str
    """Its type and, on a GPU, its compute capability: kernels differ."""
    dtype: str
    shape: tuple[int, ...]
    """Without the number of blocks."""
    run_bytes: int
    """Size of each contiguous run that a page is cut into."""
    axes: tuple[int, ...]
    """The tensor's axes, from the outermost in memory to the innermost."""
    strides: tuple[int, ...]
    """In elements, of each axis; of those outside of the blocks' axis for one block."""
    layout: str
    """vLLM's name of it."""
    kernel: str
    live: tuple[tuple[str, str], ...]
    """See identity/live_facts.py."""
    others: str = ""
    """Digest of these facts of each layer's tensor, where not all are of one kind."""
    layers: str = ""
    """Digest of its layers' names, where a pipeline has several stages."""

    def facts(self) -> dict[str, Any]:
        """For the namespace: with one stage, and layers of one kind, as it always was."""
        found = asdict(self)
        for name in ("others", "layers"):
            if not found[name]:
                del found[name]
        return found


@dataclass(frozen=True, slots=True)
class KvPage:
    """Where K and V of one block are in a page: in every layer."""

    dtype: str
    block_tokens: int
    num_heads: int
    head_dim: int
    key: tuple[int, ...]
    """See ContentSide."""
    value: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankDescription:
    """A rank, as the scheduler side knows it."""

    kv: KvFacts
    rows: int | None
    """Rows of the write buffer. None: copies do not run beside the model, and are over when
    begun."""
    slots: int
    """Slots of the pool, from the first on, that it can copy from and to."""
    is_alone: bool
    """No other connector writes to blocks."""
    own_files: str | None
    """Why only the model's code knows which files it loads. None: they can be named."""
    why_not_moved: str | None
    """None: it can load KV to other positions."""
    page: KvPage | None = None
    """Where K and V are in a page, if a codec has to know."""
    why_no_page: str | None = None
    """Why that cannot be said."""
    stages: tuple[tuple[int, ...], ...] = ()
    """See Geometry."""
    replicas: int = 1

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"stages": [_runs(stage) for stage in self.stages]}
        for name in ("own_files", "why_not_moved", "why_no_page"):
            reason = found[name]
            if reason is not None and len(reason) > REASON_MAX:
                found[name] = reason[:REASON_MAX] + " ..."
        return found

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> RankDescription:
        rest = dict(found)
        page = rest.pop("page", None)
        if page is not None:
            sides = {name: tuple(page[name]) for name in ("key", "value")}
            rest["page"] = KvPage(**dict(page) | sides)
        rest["stages"] = tuple(map(_regions_of, found["stages"]))
        kv = dict(rest.pop("kv"))
        kv["live"] = tuple((str(name), str(value)) for name, value in kv["live"])
        for name in ("shape", "axes", "strides"):
            kv[name] = tuple(kv[name])
        return cls(KvFacts(**kv), **rest)


def _runs(regions: Sequence[int]) -> list[list[int]]:
    """Bytes of a page, and of how many regions in a row: a rank has little room."""
    return [[page_bytes, len(list(some))] for page_bytes, some in groupby(regions)]


def _regions_of(runs: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(page_bytes for page_bytes, count in runs for _ in range(count))
