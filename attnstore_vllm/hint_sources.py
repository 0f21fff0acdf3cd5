# SPDX-License-Identifier: Apache-2.0
"""Hints of other standards, as ours (hints.py). What of them reaches a connector of vLLM 0.32:

    Request.session_id                      session
    Request.kv_hints                        actions `attnstore.hints`, whose payload is our section
    kv_transfer_params.kv_hint              the same: Dynamo's, as a mapping
    kv_transfer_params.agent_hint           session_id, parent_session_id, cache_control.ttl
    kv_transfer_params.prompt_cache_key     session, where nothing else tells one

What a request says in our own section holds before all others. Of these the first that tells a
thing holds, in the order above, but for the key, which comes last. As there, what makes no sense is
ignored and counted, and no request fails: nor does it hide what another source says of the same
thing.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from attnstore_vllm.hints import KEYS, NO_HINTS, SECTION, HintReader, Hints, makes_sense

ACTION: Final = "attnstore.hints"
VERSION: Final = "1"
"""Before the first dot of an action's version; what comes behind changes no meaning."""
ACTIONS_MAX = 16
"""Actions of ours in an envelope that are read."""
LOOKED_AT_MAX = 256
"""Actions of an envelope that are looked at, of ours and of others. Behind these, and behind ours
that are read, one may say `store: false`: so nothing is stored."""
ACTION_TEXT_MAX = 64
_TOO_MUCH = object()
"""Stands for what makes no sense."""


class Hinting(Protocol):
    """A request of vLLM, as far as it is read here."""

    kv_transfer_params: dict[str, Any] | None


def read(reader: HintReader, request: Hinting) -> Hints:
    """All hints of a request. Cost: constant, however much it has."""
    session, envelope = getattr(request, "session_id", None), getattr(request, "kv_hints", None)
    return read_params(reader, request.kv_transfer_params, session, envelope)


def read_params(
    reader: HintReader, params: object, session: object = None, envelope: object = None
) -> Hints:
    """As read(), of kv_transfer_params alone where no more of a request is known: so of a streaming
    session's later inputs. vLLM keeps the session_id and the kv_hints of the first."""
    if session is None and envelope is None and not params:
        return NO_HINTS
    asked = params if isinstance(params, dict) else {}
    told = _Told()
    if SECTION in asked:
        told.section(asked[SECTION])
    told.field("session", session)
    told.envelope(envelope)
    told.envelope(asked.get("kv_hint"))
    told.agent_hint(asked.get("agent_hint"))
    if "session" not in told.hints:
        told.field("session", asked.get("prompt_cache_key"))
    if not told.hints and not told.ignored:
        return NO_HINTS
    return reader.read({SECTION: told.hints}).with_ignored(told.ignored)


class _Told:
    """Hints by our keys, of all that tell some, and how many were ignored."""

    def __init__(self) -> None:
        self.hints: dict[str, object] = {}
        self.ignored = 0

    def take(self, key: str, value: object) -> None:
        """The first word holds that makes sense. Another one hides nothing."""
        if makes_sense(key, value):
            self.hints.setdefault(key, value)
        else:
            self.ignored += 1

    def field(self, key: str, value: object) -> None:
        """As take(), of a field that says nothing where it is empty."""
        if value is not None and value != "":
            self.take(key, value)

    def section(self, section: object) -> None:
        """Our own section, or what is like it."""
        if not isinstance(section, dict):
            self.ignored += 1
            return
        known = [key for key in KEYS if key in section]
        self.ignored += len(section) - len(known)
        for key in known:
            self.take(key, section[key])

    def envelope(self, envelope: object) -> None:
        if envelope is None:
            return
        actions = _part(envelope, "actions")
        if not isinstance(actions, list):
            self.ignored += 1
            return
        unseen = max(0, len(actions) - LOOKED_AT_MAX)
        num_ours = 0
        for action in actions[:LOOKED_AT_MAX]:
            kind = _part(action, "action_type")
            if not isinstance(kind, str):
                self.ignored += 1
            elif kind == ACTION:
                num_ours += 1
                if num_ours <= ACTIONS_MAX:
                    self.section(_payload(action))
        unread = unseen + max(0, num_ours - ACTIONS_MAX)
        self.ignored += unread
        if unread:  # one of them may say so
            self.hints.setdefault("store", False)

    def agent_hint(self, hint: object) -> None:
        if hint is None:
            return
        if not isinstance(hint, dict):
            self.ignored += 1
            return
        self.field("session", hint.get("session_id"))
        self.field("parent", hint.get("parent_session_id"))
        control = hint.get("cache_control")
        if isinstance(control, dict):
            self.field("ttl", control.get("ttl"))
        elif control is not None:
            self.ignored += 1


def _payload(action: object) -> object:
    """That of an action of ours, if its version is known."""
    version = _part(action, "action_version")
    is_known = isinstance(version, str) and len(version) <= ACTION_TEXT_MAX
    is_ours = is_known and str(version).split(".", 1)[0] == VERSION
    return _part(action, "payload") if is_ours else _TOO_MUCH


def _part(whole: object, name: str) -> object:
    """A part of a mapping, as JSON has it, or of vLLM's own type."""
    return whole.get(name) if isinstance(whole, dict) else getattr(whole, name, None)
