# SPDX-License-Identifier: Apache-2.0
"""A day's budget that many starts share, none of which knows what another owed."""

from __future__ import annotations

import pytest

from attnstore_vllm.policy.budget import Budget

DAY_S = 86_400


@pytest.mark.parametrize("starts", [1, 24, 30, 48, 288])
def test_no_start_forgets_what_an_earlier_one_owed(starts: int) -> None:
    """Records of 32 MiB, 1 GiB a day: an hour's share is hardly more than one of them."""
    daily, record, written = 1 << 30, 32 << 20, 0
    seconds = DAY_S // starts
    for start in range(starts):
        begun = float(start * seconds)
        budget = Budget(daily / DAY_S, 3600.0, empty_at=begun)
        written += sum(record for s in range(seconds) if budget.take(begun + s, record))
    assert written <= daily
    assert written > 0.6 * daily or seconds < DAY_S / 32, "less than a record's share"


def test_a_record_of_more_than_an_hours_share_is_written_when_it_is_saved_up() -> None:
    budget = Budget(1.0, 3600.0, empty_at=0.0)
    assert [at for at in range(0, 60_000, 100) if budget.take(float(at), 20_000)] == [
        20_000,
        40_000,
    ]
