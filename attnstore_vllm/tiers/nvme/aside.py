# SPDX-License-Identifier: Apache-2.0
"""Files that an audit leaves in the store's directory: chunks that were wrong, and the mark that a
namespace is not served any more.

    audit/<key>-<unix ns>.kv    a line of JSON without tokens, the stored bytes, the computed ones
    audit/stopped-<namespace>   why; an operator removes it
    audit/learned               how far rounding goes, and which chunks have shown it: JSON, of the
                                namespace that is in use

KV tells of its tokens to who has the model: all of it has the rights of the store's own file, and
`ttl` does not end it. A reset that is asked for does, and `attnstore gc`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnstore_vllm.own_files import make_directory, open_own, open_regular, read_own, replace_own

DIRECTORY = "audit"
SUFFIX = ".kv"
HEAD_MAX = 1 << 20
"""Bytes of the line of JSON."""
NAME_HEX = 16
LEARNED, LEARNED_MAX = "learned", 1 << 18
"""A file's name, and its bytes at most: room for 80 KV cache groups."""


def stopped_path(directory: Path, namespace: bytes) -> Path:
    """The mark that KV of this namespace is not served.

    Args:
        directory: of the store.
    """
    return directory / DIRECTORY / f"stopped-{namespace.hex()[:NAME_HEX]}"


def is_stopped(directory: Path, namespace: bytes) -> bool:
    return os.path.lexists(stopped_path(directory, namespace))


class Aside:
    """Writes such files. Raises: OSError.

    Args:
        directory: of the store.
        most_bytes: of all chunks that are kept; None: none is.
    """

    def __init__(self, directory: Path, most_bytes: int | None) -> None:
        self._directory = directory
        self._most_bytes = most_bytes

    def keep(self, head: Mapping[str, Any], key: bytes, parts: Sequence[memoryview]) -> Path | None:
        """The new file; None where there is no room for it, or nothing is to be kept.

        Args:
            head: what names the chunk, and says how it differs.
            parts: the bytes, in their order.
        """
        if self._most_bytes is None:
            return None
        line = json.dumps(head, sort_keys=True).encode() + b"\n"
        size = len(line) + sum(map(len, parts))
        folder = self._directory / DIRECTORY
        make_directory(folder)
        used = sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))
        if used + size > self._most_bytes:
            return None
        path = folder / f"{key.hex()[:NAME_HEX]}-{time.time_ns()}{SUFFIX}"
        with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(line)
            for part in parts:
                file.write(part)
        return path

    def removal(self, namespace: bytes) -> Iterator[int]:
        """Removes what was kept of a namespace: see remove(). Whose a file is that is not whole
        cannot be told: it goes too."""
        name = namespace.hex()
        return remove(self._directory, lambda head: head is None or head.get("namespace") == name)

    def stop(self, namespace: bytes, why: str) -> Path:
        """Leave the mark. It outlives a power loss."""
        path = stopped_path(self._directory, namespace)
        make_directory(path.parent)
        replace_own(path, f"{why}\n".encode(), durable=True)
        return path

    def learn(self, namespace: bytes, learned: object) -> None:
        """Leave what an audit has learned, in place of what is there.

        Args:
            learned: that JSON can say.
        """
        path = self._directory / DIRECTORY / LEARNED
        make_directory(path.parent)
        said = {"namespace": namespace.hex(), "learned": learned}
        replace_own(path, json.dumps(said).encode())

    def learned(self, namespace: bytes) -> object:
        """Returns what was left for this namespace, or None. Raises nothing."""
        try:
            said = json.loads(read_own(self._directory / DIRECTORY / LEARNED, LEARNED_MAX))
        except (OSError, ValueError, RecursionError):
            return None
        is_ours = isinstance(said, dict) and said.get("namespace") == namespace.hex()
        return said.get("learned") if is_ours else None


def kept(directory: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """The chunks that are kept in a store's directory, by name, and what each file says of its own;
    None: it is not whole. It may be anything. Raises: OSError."""
    for path in sorted((directory / DIRECTORY).glob(f"*{SUFFIX}")):
        try:
            fd = open_regular(path, os.O_RDONLY)
        except FileNotFoundError:  # a server has removed it meanwhile
            continue
        with os.fdopen(fd, "rb") as file:
            line = file.readline(HEAD_MAX)
        try:
            head = json.loads(line)
        except (ValueError, RecursionError):
            head = None
        yield path, head if isinstance(head, dict) else None


def remove(directory: Path, goes: Callable[[dict[str, Any] | None], bool]) -> Iterator[int]:
    """Removes chunks that are kept in a store's directory, one at each step, and says how many
    bytes the file system has back: 0 of one that stays. Raises: OSError.

    Args:
        goes: asked with what kept() says of it.
    """
    for path, head in kept(directory):
        freed = 0
        if goes(head):
            with suppress(FileNotFoundError):  # an operator was sooner
                freed = path.stat().st_blocks * 512
            path.unlink(missing_ok=True)
        yield freed


def stops(directory: Path) -> list[Path]:
    """The marks in a store's directory."""
    return sorted((directory / DIRECTORY).glob("stopped-*"))
