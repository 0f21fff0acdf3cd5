# SPDX-License-Identifier: Apache-2.0
"""The description of its KV tensors that a worker gives the scheduler side, once, through the pool.

The fields of KvFacts decide what the bytes are: all of them go into the namespace, whichever they
are, so a new one cannot be forgotten. Those of RankDescription say how the rank works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

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
    part: str = ""
    """Which tokens of a block the rank has, where it has not all: see part_text()."""

    def facts(self) -> dict[str, Any]:
        """For the namespace: with one stage, layers of one kind and all tokens, as it always
        was."""
        found = asdict(self)
        for name in ("others", "layers", "part"):
            if not found[name]:
                del found[name]
        return found


def part_text(dcp: tuple[int, int], pcp: tuple[int, int], interleave: int) -> str:
    """The tokens of a block that a rank has under context parallelism.

    Args:
        dcp, pcp: the rank's number in its group, and the group's size.
        interleave: tokens that follow each other on a rank.
    """
    by = f", {interleave} tokens at a time" if dcp[1] > 1 else ""
    return f"decode rank {dcp[0]} of {dcp[1]}{by}, prefill rank {pcp[0]} of {pcp[1]}"


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


class PageSide(NamedTuple):
    """Numbers of a page that an audit compares together."""

    name: str
    dtype: str
    shape: tuple[int, int, int]
    """Tokens, heads, dims."""
    content: tuple[int, ...]
    """See ContentSide."""


class GroupPages(NamedTuple):
    """Pages that a rank has of a KV cache group, for an audit."""

    num_layers: int
    sides: tuple[PageSide, ...] = ()
    """Those that every layer's page has; none: it cannot be said."""
    why_none: str = ""


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
    groups: tuple[GroupPages, ...] = ()
    """Pages of each KV cache group, the spine's first, if an audit has to know them."""
    node: tuple[str, int, str] | None = None
    """A node that is not the first, of its first rank: its name, its bytes of NVMe, and the digest
    of its weights if that is known (connector/nodes.py)."""

    def to_json(
        self, has_room: Callable[[Mapping[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Args: has_room: whether so much may be said; else what an audit has to know is left
        out."""
        found = asdict(self) | {"stages": [_runs(stage) for stage in self.stages]}
        for name in ("own_files", "why_not_moved", "why_no_page"):
            reason = found[name]
            if reason is not None and len(reason) > REASON_MAX:
                found[name] = reason[:REASON_MAX] + " ..."
        return found if has_room(found) else found | {"groups": ()}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> RankDescription:
        rest = dict(found)
        page = rest.pop("page", None)
        if page is not None:
            sides = {name: tuple(page[name]) for name in ("key", "value")}
            rest["page"] = KvPage(**dict(page) | sides)
        rest["stages"] = tuple(map(_regions_of, found["stages"]))
        rest["groups"] = tuple(map(_pages_of, found["groups"]))
        if rest.get("node") is not None:
            rest["node"] = tuple(rest["node"])
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


def _pages_of(found: Sequence[Any]) -> GroupPages:
    num_layers, sides, why_none = found
    return GroupPages(
        num_layers,
        tuple(
            PageSide(name, dtype, (shape[0], shape[1], shape[2]), tuple(content))
            for name, dtype, shape, content in sides
        ),
        why_none,
    )
