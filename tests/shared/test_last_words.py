# SPDX-License-Identifier: Apache-2.0
"""A child that ends says why, and no password."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.tiers.shared.backend import backend_of
from attnstore_vllm.tiers.shared.helper import TEXT_MAX, Helper, LastWords
from attnstore_vllm.tiers.shared.lanes import Lanes


def test_a_child_that_ends_has_its_last_words_in_the_error() -> None:
    helper = Helper({"redis": {}}, Lanes(4096, 2, 1))
    with pytest.raises(DeviceError, match=r"has ended.*said:\nTraceback(.|\n)*KeyError"):
        helper.start()
    assert not helper.is_running
    with pytest.raises(DeviceError, match="has ended; the last that"):
        helper.read(bytes(32), 1.0)  # a lane that comes later
    helper.close()


def _say(program: str, settings: dict[str, Any]) -> str:
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, bufsize=0)
    assert process.stderr is not None
    backend, options = backend_of(settings)
    words = LastWords(process.stderr, backend.secrets(options))
    assert process.wait(10.0) == 0, "nobody reads what it says"
    return str(words)


def test_the_last_lines_alone_are_told() -> None:
    said = _say(
        "import sys\nfor n in range(30_000): print('line', n, file=sys.stderr)", {"redis": {}}
    )
    assert len(said) <= TEXT_MAX
    assert said.endswith("line 29998\nline 29999")


def test_no_password_is_told() -> None:
    options = {"url": "redis://user:in%20url@there", "password": "of-a-file"}
    program = "import sys; print('in url, in%20url, of-a-file, user', file=sys.stderr)"
    said = _say(program, {"redis": options})
    assert said == "***, ***, ***, user"
