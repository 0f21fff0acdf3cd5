# SPDX-License-Identifier: Apache-2.0
"""Errors, and what the connector does about each.

AttnStoreError
  ConfigError          a setting is wrong         refuse to start
    MachineError       it is more than is here    refuse to start
  UnsupportedError     this vLLM or its shape     refuse to start
  DeviceError          the disk answered errno    the record is lost, its tokens are prefilled
  CorruptRecordError   the bytes are not ours     the record is dropped, its tokens are prefilled
  GoneError            others have not what   the entry is dropped, its tokens are prefilled
                       they said they had
  CopyError            the device failed a copy   the save is dropped, the load's tokens are
                       between HBM and DRAM       prefilled; see transfer/worker_copies.py
    DoesNotFitError    pages have too many bytes  the save is dropped

Absence (a miss, no room for a save) is a value and never an error. A lost chunk costs a
prefill; a wrong chunk costs the answer, so nothing here is ever retried into a hit.
"""

from __future__ import annotations


class AttnStoreError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(AttnStoreError):
    """A setting is missing, unknown, out of range, or asks for more than the machine has."""


class MachineError(ConfigError):
    """A setting that is right in itself, and that this machine cannot meet now: `attnstore doctor`
    looks at it, and `attnstore check` does not."""


class UnsupportedError(AttnStoreError):
    """This vLLM, or the way it was started, cannot be served by the store."""


class DeviceError(AttnStoreError):
    """The operating system refused an I/O request, or the device is closed.

    Args:
        errno: what the system said of it; 0: nothing.
    """

    def __init__(self, text: str, errno: int = 0) -> None:
        super().__init__(text)
        self.errno = errno


class GoneError(AttnStoreError):
    """A remote tier has not, or not in time, what it said it had. No fault: others may
    drop what they have."""


class CopyError(AttnStoreError):
    """A copy between HBM and DRAM failed: what it wrote is not to be used."""


class DoesNotFitError(CopyError):
    """Encoded pages have more bytes than their cells of a slot (transfer/geometry.py).

    Args:
        slots: whose content is not to be used; the other ones of the copy are right.
    """

    def __init__(self, slots: frozenset[int]) -> None:
        super().__init__(f"pages of {len(slots)} slots do not fit in their cells")
        self.slots = slots


class CorruptRecordError(AttnStoreError):
    """A record on disk is torn, misplaced or damaged. Never retried: the bytes are wrong."""

    def __init__(self, where: str, field: str, want: object, got: object) -> None:
        super().__init__(
            f"{where}: {field} is {got!r}, expected {want!r}; "
            "the record is dropped and its tokens will be prefilled again"
        )
        self.field = field
