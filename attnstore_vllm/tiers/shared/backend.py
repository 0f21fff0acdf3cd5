# SPDX-License-Identifier: Apache-2.0
"""The seam of a network store: what the child process (child.py) asks of a client.

No method waits for a store that does not answer, and then tries again: the engine gives up at a
deadline of its own, and ends the child then.

Another store is a class of Backend, and an entry of config/shared.py: KINDS. Nothing else knows
kinds by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from attnstore_vllm.config.shared import KINDS
from attnstore_vllm.plain_text import printable

MISSING = -1
"""Result of a get: there is nothing of this name."""
WRONG_SIZE = -2
"""Result of a get: there is something, which cannot be ours."""
FAILED = -3
"""The store refused this one, as a full one does."""


WORDS_MAX = 512
"""Characters of what a store says that a log has."""


class BackendError(Exception):
    """The store cannot be asked now. The message is a sentence without secrets.

    It may quote the store, or who stands in between: so what would forge a line of the log, or
    order a terminal about, is escaped here, and what is long is cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message[:WORDS_MAX])[:WORDS_MAX])


class NoAnswerError(BackendError):
    """The store hangs: its client waited for an answer, and gave up."""


class Backend(ABC):
    """One client. Each lane of the child has a thread and a backend of its own.

    RecordNames are text. Places are of memory that strangers may write: nothing is verified here.
    """

    @abstractmethod
    def __init__(
        self, options: Mapping[str, Any], buffer: memoryview | None, shared: dict[str, Any]
    ) -> None:
        """Raises BackendError.

        Args:
            options: of the store (config/shared.py: for_client).
            buffer: the lanes' memory, which some clients have to know.
            shared: what the lanes of one process have together.
        """

    @classmethod
    def environment(cls) -> Mapping[str, str]:
        """Variables of the environment of the process that is to own the client."""
        return {}

    @classmethod
    def secrets(cls, options: Mapping[str, Any]) -> Collection[str]:
        """Parts of the options that no log may have."""
        return ()

    @abstractmethod
    def exist(self, names: Sequence[str]) -> list[bool]: ...

    @abstractmethod
    def get(self, names: Sequence[str], places: Sequence[memoryview]) -> list[int]:
        """Fill each place, whose size is that of a record. Returns its bytes, MISSING,
        WRONG_SIZE or FAILED of each."""

    @abstractmethod
    def put(
        self, names: Sequence[str], values: Sequence[memoryview], *, overwrite: bool
    ) -> list[int]:
        """Returns 0 or FAILED of each. 0 is no proof that the value is there."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> list[int]:
        """Returns for each 0, also if there was nothing, or FAILED: who asks may not delete."""

    @abstractmethod
    def read(self, name: str, at_most: int) -> bytes | None:
        """A small value."""

    @abstractmethod
    def write(self, name: str, value: bytes, *, overwrite: bool) -> None:
        """A small value, if there is none or with `overwrite`."""

    @abstractmethod
    def count(self, prefix: str) -> tuple[int, int] | None:
        """Values whose names begin so, and their bytes; None: this store cannot say.
        Cost: a look at all names of the store."""

    @abstractmethod
    def remove(self, prefix: str) -> int:
        """Delete the values whose names begin so. Returns how many there were. What is written
        meanwhile may stay. Cost: a look at all names of the store."""

    def close(self) -> None:  # noqa: B027 - not all have something
        """Let go what the client has."""


def backend_of(settings: Mapping[str, Any]) -> tuple[type[Backend], Mapping[str, Any]]:
    """The kind of client, and its options.

    Args:
        settings: of one store, by its kind, as in {"redis": {...}}.
    """
    kind = next(name for name in KINDS if name in settings)
    module, _, name = KINDS[kind].backend.partition(":")
    backend: type[Backend] = getattr(import_module(module), name)
    return backend, settings[kind]


def open_backend(
    settings: Mapping[str, Any], buffer: memoryview | None, shared: dict[str, Any]
) -> Backend:
    """See backend_of() and Backend. Raises BackendError."""
    backend, options = backend_of(settings)
    return backend(options, buffer, shared)
