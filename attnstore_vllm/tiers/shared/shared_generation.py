# SPDX-License-Identifier: Apache-2.0
"""Which generation of a namespace's records an engine may use. Decides; reads and writes nothing.

The store has one value for each namespace: the present generation, which is in the name of every
record. After a reset an engine never uses a generation again that it has used. It goes on with the
one that follows, which it makes known, or which others have made known meanwhile. An engine that
finds another generation than its own was not reset when others were: it keeps out until it is. Then
it joins theirs, which was there before its own reset (docs/faults.md): what it meets is of after
the reset that it missed, and no more is promised.

A generation is an anchor, which is random, and a count. The next one has the count that follows:
so engines that are reset together agree, and what an engine has left is one count an anchor.

The value is sealed. A stranger without the secret can delete it, or put back an old one. An engine
that knew a later one goes back to none: it writes its own again.

Weights that were changed in memory are not in the namespace. After a reset an engine keeps out
until its workers have seen that the weights are what they were; if they are not, for good. Others
leave the generation that it used as well: between the change and the look it may have written KV
of other weights.

An engine remembers all this for each namespace alone, in a file of its own: another model of the
same directory is reset when its servers are, and not with these.
"""

from __future__ import annotations

import json
import logging
import secrets
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from attnstore_vllm.own_files import read_own, replace_own, take_old_name
from attnstore_vllm.tiers.shared.secret import SEAL_BYTES, SharedKeys

logger = logging.getLogger(__name__)

MAGIC = b"ASGEN002"
ANCHOR_BYTES = 16
COUNT_MAX = (1 << 63) - 1
JUMP_BITS = 32
LEFT_MAX = 256
"""Anchors that an engine remembers. With more the oldest is forgotten: since then the store has
lost all that it had so many times."""
OLD_FILE_NAME = "shared-generation.json"
"""A version before had one for all namespaces: the first that starts takes it."""
FILE_BYTES_MAX = 1 << 20
_DAMAGED = ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError
"""Errors of from_json(), and those of json for what lies too deep."""
_BODY = struct.Struct(f"<8s{ANCHOR_BYTES}sQ")


def file_name(namespace: bytes) -> str:
    """In the store's directory."""
    return f"shared-generation-{namespace.hex()[:32]}.json"


class GenerationId(NamedTuple):
    anchor: bytes
    number: int

    @property
    def raw(self) -> bytes:
        """As names of records have it."""
        return self.anchor + self.number.to_bytes(8, "little")


def name_of(namespace: bytes, keys: SharedKeys) -> bytes:
    """The name of the value that says which generation of a namespace is the present one."""
    return keys.name(b"attnstore shared generation", MAGIC, namespace)


def encode(generation: GenerationId, name: bytes, keys: SharedKeys) -> bytes:
    body = _BODY.pack(MAGIC, *generation)
    return body + keys.seal(b"attnstore shared generation", name, body)


def decode(value: bytes, name: bytes, keys: SharedKeys) -> GenerationId | None:
    """None: the value is no generation, or not sealed with these keys for this name."""
    body, seal = value[: _BODY.size], value[_BODY.size :]
    if len(value) != _BODY.size + SEAL_BYTES:
        return None
    if not keys.is_seal(seal, b"attnstore shared generation", name, body):
        return None
    magic, anchor, count = _BODY.unpack(body)
    return GenerationId(anchor, count) if magic == MAGIC and count <= COUNT_MAX else None


@dataclass(slots=True)
class SharedGeneration:
    """See the module. Its caller has the lock."""

    left: dict[bytes, int] = field(default_factory=dict)
    """By anchor the highest count that is never used again, nor any below: the newest last."""
    must_renew: bool = False
    """It was reset while it knew none: all that is there is of before."""
    mine: GenerationId | None = None
    is_behind: bool = False
    """Others were reset, and this engine was not."""
    is_in_doubt: bool = True
    """No worker has looked yet whether the weights are those of the namespace."""
    has_changed: bool = False
    """They are not: for good."""
    was_reset: bool = False
    is_unsaved: bool = False
    """The disk does not say this yet. After a restart the engine would not know what it used."""

    @property
    def usable(self) -> bytes | None:
        is_out = self.is_in_doubt or self.has_changed or self.is_behind or self.is_unsaved
        return None if is_out or self.mine is None else self.mine.raw

    @property
    def why_out(self) -> str | None:
        if self.has_changed:
            return "the weights in memory are not those of the model's files"
        if self.is_behind:
            return "another server was reset and this one was not: reset it as well"
        return None

    def reset(self) -> None:
        self.must_renew = self.must_renew or (self.mine is None and not self.is_behind)
        self._leave_mine()
        self.is_in_doubt, self.is_behind, self.was_reset = True, False, True

    def weights_seen(self, same: bool | None) -> None:
        """Args: same: None: they cannot be seen. They are then as at the start until a reset."""
        self.has_changed |= not (not self.was_reset if same is None else same)
        self.is_in_doubt = False

    def see(self, theirs: GenerationId | None) -> GenerationId | None:
        """The store has this generation now, or none that can be believed. Returns what it is to
        have instead, if that is ours to say; see() is called again then."""
        if theirs is not None and not self._has_left(theirs):
            self._leave(theirs._replace(number=theirs.number - 1))  # so no old one can be put back
        if self.is_behind:
            return None
        if self.has_changed:  # KV of these weights may be there, under the names of the files'
            is_left = theirs is not None and self._has_left(theirs)
            return self._next(theirs.anchor) if theirs is not None and is_left else None
        if theirs is None:  # a store that is new, or has lost it: with it all that it had
            return self.mine or self._next(next(reversed(self.left), None))
        if self.must_renew:
            # None that just follows: it may have been there before the reset too.
            self._leave(theirs)
            self.must_renew = False
            self.mine = self._next(theirs.anchor, 1 + secrets.randbits(JUMP_BITS))
            self._leave(self.mine._replace(number=self.mine.number - 1))
            return self.mine
        if self._has_left(theirs):
            return self.mine or self._next(theirs.anchor)
        if self.mine is None:
            self.mine = theirs
        elif self.mine != theirs:
            self._leave_mine()
            self.is_behind = True
        return None

    def _next(self, anchor: bytes | None, steps: int = 1) -> GenerationId:
        """The one after those of this anchor that were left; the first of a new one for None."""
        count = self.left.get(anchor, -1) + steps if anchor is not None else 0
        if anchor is None or count > COUNT_MAX:
            return GenerationId(secrets.token_bytes(ANCHOR_BYTES), 0)
        return GenerationId(anchor, count)

    def _has_left(self, generation: GenerationId) -> bool:
        return generation.number <= self.left.get(generation.anchor, -1)

    def _leave(self, generation: GenerationId) -> None:
        before = self.left.pop(generation.anchor, -1)
        self.left[generation.anchor] = max(before, generation.number)
        while len(self.left) > LEFT_MAX:
            del self.left[next(iter(self.left))]

    def _leave_mine(self) -> None:
        if self.mine is not None:
            self._leave(self.mine)
        self.mine = None

    # ---- over a restart ----------------------------------------------------------------

    def to_json(self) -> str:
        mine = [self.mine.anchor.hex(), self.mine.number] if self.mine is not None else None
        left = {anchor.hex(): count for anchor, count in self.left.items()}
        return json.dumps(
            {"left": left, "renew": self.must_renew, "mine": mine, "behind": self.is_behind}
        )


def from_json(text: str) -> SharedGeneration:
    """Raises ValueError, LookupError, TypeError, AttributeError, OverflowError."""
    said = json.loads(text)
    if isinstance(said["left"], list):
        # Of format 1, whose records have other names. After a reset all that is there is of before.
        was_reset = said["mine"] is None and bool(said["left"])
        return SharedGeneration(must_renew=bool(said["renew"]) or was_reset)
    left = {bytes.fromhex(anchor): int(count) for anchor, count in said["left"].items()}
    # What NVMe has is of this one. If others were reset meanwhile, it may not join them.
    mine = said["mine"]
    known = GenerationId(bytes.fromhex(mine[0]), int(mine[1])) if mine is not None else None
    ids = [*left.items(), *([known] if known is not None else [])]
    if any(len(anchor) != ANCHOR_BYTES or not -1 <= n <= COUNT_MAX for anchor, n in ids):
        raise ValueError("no generation")
    return SharedGeneration(left, bool(said["renew"]), known, bool(said["behind"]))


def load(directory: Path, namespace: bytes) -> SharedGeneration:
    """As the last process of this directory and namespace left it. A file that cannot be read
    makes everything that is there a thing of before."""
    path = directory / file_name(namespace)
    try:
        take_old_name(directory / OLD_FILE_NAME, path)
        return from_json(read_own(path, FILE_BYTES_MAX).decode())
    except FileNotFoundError:
        return SharedGeneration()
    except (OSError, *_DAMAGED) as error:
        logger.warning("%s cannot be used (%s): all that the shared tier has is old", path, error)
        return SharedGeneration(must_renew=True)


def save(directory: Path, namespace: bytes, text: str) -> None:
    """Durable when it returns. Raises OSError."""
    replace_own(directory / file_name(namespace), text.encode(), durable=True)
