# SPDX-License-Identifier: Apache-2.0
"""Somebody else with access to a store."""

from __future__ import annotations

from collections.abc import Sequence

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.tiers.shared.helper import Helper
from attnstore_vllm.tiers.shared.lanes import LaneOp, Lanes
from attnstore_vllm.tiers.shared.record import HEADER_BYTES
from tests.helpers import PAYLOAD_BYTES


class Stranger:
    """Somebody else with access to the store, who reads and writes what he likes."""

    def __init__(self, server: NetworkStore, payload_bytes: int = PAYLOAD_BYTES) -> None:
        self._server = server
        self._payload_bytes = payload_bytes
        self._helper = self._open(payload_bytes)

    def _open(self, payload_bytes: int) -> Helper:
        helper = Helper(self._server.settings, Lanes(payload_bytes, 2, 1))
        helper.start()
        return helper

    def get(self, name: bytes) -> bytes:
        """Nothing of one of another size than a record's."""
        if self._helper.numbers(1, LaneOp.GET, [name], 5.0)[0] < 0:
            return b""
        return bytes(self._helper.lanes.place(self._helper.buffer, 1, 0))

    def put(self, name: bytes, value: bytes) -> None:
        """Whatever is there, also of another size."""
        size = len(value) - HEADER_BYTES
        helper = self._helper if size == self._payload_bytes else self._open(size)
        helper.lanes.place(helper.buffer, 1, 0)[:] = value
        assert helper.numbers(1, LaneOp.OVERWRITE, [name], 5.0) == [0]
        if helper is not self._helper:
            helper.close()

    def has(self, names: Sequence[bytes]) -> list[int]:
        try:
            return self._helper.numbers(0, LaneOp.EXIST, names, 5.0)
        except DeviceError:
            return []

    def delete(self, names: Sequence[bytes]) -> None:
        assert not any(self._helper.numbers(0, LaneOp.DELETE, names, 5.0))

    def close(self) -> None:
        self._helper.close()
