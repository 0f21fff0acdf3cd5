# SPDX-License-Identifier: Apache-2.0
"""Which generation of a namespace's records an engine may use. Decides; reads and writes nothing.

The store has one value for each namespace: the present generation, which is in the name of every
record. After a reset an engine never uses a generation again that was there before. It goes on with
the one that follows, which it makes known, or which others have made known meanwhile. An engine
that finds another generation than its own was not reset when others were: it keeps out until it is.

The next generation is a hash of the one before. So engines that are reset together agree.

Weights that were changed in memory are not in the namespace. After a reset an engine keeps out
until its workers have seen that the weights are what they were; if they are not, for good. Others
leave the generation that it used as well: between the change and the look it may have written KV
of other weights.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from attnstore_vllm.own_files import read_own, replace_own

MAGIC = b"ASGEN001"
GENERATION_BYTES = 16
LEFT_MAX = 256
"""Generations that an engine remembers to have left. With more it keeps out for good."""
FILE_NAME = "shared-generation.json"
FILE_BYTES_MAX = 1 << 20


def name_of(namespace: bytes) -> bytes:
    """The name of the value that says which generation of a namespace is the present one."""
    return blake3(b"attnstore shared generation" + namespace).digest()


def following(generation: bytes) -> bytes:
    return blake3(b"attnstore next generation" + generation).digest()[:GENERATION_BYTES]


@dataclass(frozen=True, slots=True)
class NewValue:
    """A value to be written to the store. It is used once it has been read there."""

    value: bytes
    overwrite: bool


@dataclass(slots=True)
class SharedGeneration:
    """See the module. Its caller has the lock."""

    left: list[bytes] = field(default_factory=list)
    """Never used again."""
    must_renew: bool = False
    """It was reset while it knew none: whatever is there is of before."""
    mine: bytes | None = None
    is_in_doubt: bool = True
    """Nobody has looked yet whether the weights are those of the namespace."""
    has_changed: bool = False
    """They are not: for good."""
    is_behind: bool = False
    """Others were reset, and this engine was not."""
    was_reset: bool = False

    @property
    def usable(self) -> bytes | None:
        return None if self.is_in_doubt or self.has_changed or self.is_behind else self.mine

    @property
    def why_out(self) -> str | None:
        if self.has_changed:
            return "the weights in memory are not those of the model's files"
        if self.is_behind:
            return "another server was reset and this one was not: reset it as well"
        return None

    def reset(self) -> None:
        self.must_renew = self.must_renew or (self.mine is None and not self.is_behind)
        self._leave()
        self.is_in_doubt, self.is_behind, self.was_reset = True, False, True

    def weights_seen(self, same: bool | None) -> None:
        """Args: same: None: nobody can see them. They are then as at the start until a reset."""
        is_same = not self.was_reset if same is None else same
        self.has_changed |= not is_same or len(self.left) > LEFT_MAX
        self.is_in_doubt = False

    def see(self, value: bytes | None) -> NewValue | None:
        """The store has this value now. Returns what it is to have instead, if that is ours to
        say; see() is called again then."""
        if self.is_behind:
            return None
        theirs = None
        if value is not None and len(value) == len(MAGIC) + GENERATION_BYTES:
            theirs = value[len(MAGIC) :] if value.startswith(MAGIC) else None
        if self.has_changed:  # KV of these weights may be there, under the names of the files'
            return NewValue(MAGIC + self._next(theirs), True) if theirs in self.left else None
        if theirs is None:  # a store that is new, or has lost it: with it all that it had
            made = self.mine or secrets.token_bytes(GENERATION_BYTES)
            return NewValue(MAGIC + made, value is not None)
        if self.must_renew:
            # None that follows from others: it may have been there before the reset too.
            self.must_renew, self.mine = False, secrets.token_bytes(GENERATION_BYTES)
            self.left.append(theirs)
            return NewValue(MAGIC + self.mine, True)
        if theirs in self.left:
            return NewValue(MAGIC + self._next(theirs), True)
        if self.mine is None:
            self.mine = theirs
        elif self.mine != theirs:
            self._leave()
            self.is_behind = True
        return None

    def _next(self, generation: bytes) -> bytes:
        while (generation := following(generation)) in self.left:
            pass
        return generation

    def _leave(self) -> None:
        if self.mine is not None and self.mine not in self.left:
            self.left.append(self.mine)
        self.mine = None

    # ---- over a restart ----------------------------------------------------------------

    def to_json(self) -> str:
        mine = self.mine.hex() if self.mine is not None else None
        left = [one.hex() for one in self.left]
        return json.dumps({"left": left, "renew": self.must_renew, "mine": mine})


def load(directory: Path) -> SharedGeneration:
    """As the last process of this directory left it. A file that cannot be read makes everything
    that is there a thing of before."""
    try:
        said = json.loads(read_own(directory / FILE_NAME, FILE_BYTES_MAX))
        left = [bytes.fromhex(one) for one in said["left"]]
        # What NVMe has is of this one. If others were reset meanwhile, it may not join them.
        mine = said["mine"]
        return SharedGeneration(left, bool(said["renew"]), mine and bytes.fromhex(mine))
    except FileNotFoundError:
        return SharedGeneration()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return SharedGeneration(must_renew=True)


def save(directory: Path, text: str) -> None:
    """Durable when it returns. Raises OSError."""
    replace_own(directory / FILE_NAME, text.encode(), durable=True)
