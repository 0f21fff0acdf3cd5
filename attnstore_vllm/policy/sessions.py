# SPDX-License-Identifier: Apache-2.0
"""Sessions by the ids that clients give them: which runs of chunks each has left, so that one
request can end them all. Pure.

An id is a client's word: it stands for no content, and is looked up among those of one tenant only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b

from attnstore_vllm.policy.visits import LastTurn, Run

SESSIONS_MAX = 4096
"""The one that was not heard of for longest is forgotten for a new one."""
RUNS_MAX = 4
"""Last runs of a session: the next turn takes over what the last one left, so more than one are
branches of it."""
CHILDREN_MAX = 32
ENDED_MAX = 256
"""Runs that one request ends: a step waits for them."""


@dataclass(slots=True)
class _Session:
    runs: deque[Run] = field(default_factory=lambda: deque(maxlen=RUNS_MAX))
    children: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    num_turns: int = 0


class SessionTable:
    """See the module. State: SESSIONS_MAX sessions, some 2 KB each, and 5 KB more for one that has
    begun CHILDREN_MAX. An id may have a thousand bytes: so digests stand for them.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def note(self, tenant: bytes, session: str, run: Run, parent: str | None = None) -> None:
        """A request of this session has left this run.

        Args:
            parent: the session that has begun this one, if that is told. Cost: O(1).
        """
        name = _digest(tenant, session)
        heard = self._heard_of(name)
        heard.runs.append(run)
        heard.num_turns += 1
        if parent is not None and parent != session:
            children = self._heard_of(_digest(tenant, parent)).children
            children[name] = None
            children.move_to_end(name)
            if len(children) > CHILDREN_MAX:
                children.popitem(last=False)

    def numbers(self, tenant: bytes, session: str) -> frozenset[int]:
        """Those of its last runs. Cost: O(RUNS_MAX)."""
        found = self._sessions.get(_digest(tenant, session))
        return frozenset() if found is None else frozenset(run.number for run in found.runs)

    def last_turn(self, tenant: bytes, session: str) -> LastTurn | None:
        """None: it has left nothing that is remembered. Cost: O(1)."""
        found = self._sessions.get(_digest(tenant, session))
        if found is None or not found.runs:
            return None
        return LastTurn(found.num_turns, found.runs[-1].since)

    def end(self, tenant: bytes, session: str) -> list[Run]:
        """The runs of this session and of those that it has begun, which are forgotten with it; the
        session's own first. Cost: O(ENDED_MAX)."""
        ended: list[Run] = []
        left = deque([_digest(tenant, session)])
        while left and len(ended) < ENDED_MAX:
            found = self._sessions.pop(left.popleft(), None)
            if found is not None:  # else it was forgotten, or two have begun each other
                ended.extend(found.runs)
                left.extend(found.children)
        return ended[:ENDED_MAX]

    def _heard_of(self, name: bytes) -> _Session:
        found = self._sessions.get(name)
        if found is None:
            found = self._sessions[name] = _Session()
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(name)
        return found


def _digest(tenant: bytes, session: str) -> bytes:
    """Stands for an id among those of its tenant. Cost: 2 us."""
    encoded = session.encode("utf-8", "surrogatepass")
    return blake2b(encoded, key=tenant[:64], digest_size=16).digest()
