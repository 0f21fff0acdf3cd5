# SPDX-License-Identifier: Apache-2.0
"""A sibling that was asked no more is tried again, also if the try before had no answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.tiers.peers.wire import MessageKind, Wire
from tests.helpers import lookup_of
from tests.peer_engine import PeerEngine, PeerProcess

LONG = 64


def test_a_sibling_that_dies_while_it_is_tried_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had hung, and was ended; another process has taken its place."""
    first, second = PeerProcess(), PeerProcess()
    here = PeerEngine(tmp_path, 0)
    try:
        first.open(tmp_path, 1)
        here.wait_ready()
        here.io.answer_deadline_s = 60.0
        breaker = here.io.siblings[0].breaker
        first.process.send_signal(signal.SIGSTOP)
        os.waitpid(first.process.pid, os.WUNTRACED)
        breaker.failure(-1e9, hung=True)  # so a try is due
        lookup = lookup_of(list(range(LONG)), may_ask=True)
        sent: list[int] = []
        send = Wire.send

        def noted(wire: Wire, kind: MessageKind, *rest: Any) -> None:
            send(wire, kind, *rest)
            sent.append(kind)

        monkeypatch.setattr(Wire, "send", noted)
        here.store.find(lookup, 0, LONG)
        here.wait(lambda: MessageKind.FIND in sent)
        assert not breaker.in_use
        first.kill()
        second.open(tmp_path, 1)
        second.call("put", 1, LONG)
        here.wait_ready()
        here.io.answer_deadline_s = 1.0
        assert here.tokens(1, LONG) == LONG
        assert breaker.in_use
    finally:
        here.close()
        first.kill()
        second.close()
