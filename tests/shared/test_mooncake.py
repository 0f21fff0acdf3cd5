# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store in short: the other tests of this directory take it too, with `-m long`."""

from __future__ import annotations

from collections.abc import Callable

from attnstore_vllm.testing.network_stores import NetworkStore
from tests.helpers import Rig, conversation
from tests.shared.rigs import NUM_TOKENS, counts, fetch, write
from tests.shared.stranger import Stranger
from tests.shared.test_shared_tier import WHOLE, flipped


def test_a_hit_and_a_flipped_byte(mooncake: NetworkStore, open_shared: Callable[..., Rig]) -> None:
    one, two = open_shared(mooncake), open_shared(mooncake)
    stranger = Stranger(mooncake)
    right, wrong = conversation(1, NUM_TOKENS), conversation(2, NUM_TOKENS)
    write(one, right)
    names = write(one, wrong)
    stranger.put(names[2], flipped(stranger.get(names[2])))
    assert fetch(two, right) == WHOLE
    assert fetch(two, wrong) == WHOLE - 1
    assert counts(two)["shared_corrupt"] == 1
    stranger.close()
