# SPDX-License-Identifier: Apache-2.0
"""The end of what the child has written to its standard error, for the log."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import unquote, urlsplit

TEXT_MAX = 2048
"""Characters that are told."""
_KEPT_BYTES = 4 * TEXT_MAX
_END_S = 0.2
"""How long the end of a process that was ended is waited for."""


class LastWords:
    """Reads the stream until the process has ended, and keeps little of it.

    Args:
        settings: of the child. Passwords in them are not told.
    """

    def __init__(self, stream: IO[bytes], settings: Mapping[str, Any]) -> None:
        self._stream = stream
        options = settings.get("redis", {})
        in_url = urlsplit(options.get("url", "")).password or ""
        secrets = {options.get("password", ""), in_url, unquote(in_url)}
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._kept = b""
        self._thread = threading.Thread(target=self._run, name="attnstore-shared-said", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._stream:
            while some := self._stream.read(4096):
                self._kept = (self._kept + some)[-_KEPT_BYTES:]

    def __str__(self) -> str:
        """Empty if it has said nothing."""
        self._thread.join(_END_S)
        text = self._kept.decode(errors="replace").strip()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text[-TEXT_MAX:]
