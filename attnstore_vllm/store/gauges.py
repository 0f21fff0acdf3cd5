# SPDX-License-Identifier: Apache-2.0
"""Values of a store as they are now, for its metrics."""

from __future__ import annotations

from collections.abc import Sequence

from attnstore_vllm.policy.hit_curve import HitCurve
from attnstore_vllm.store.limited_residency import tenant_gauges
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.tier_io import TierIo
from attnstore_vllm.types import DRAM


def gauges_of(
    context: Context, curve: HitCurve, tiers: Sequence[TierIo]
) -> dict[tuple[str, str], float]:
    """As (name, label): value. With the store's lock held.

    Args:
        tiers: those behind DRAM.
    """
    dram, slot_bytes = context.residency.dram, context.pool.slot_bytes
    gauges = {
        ("held_bytes", DRAM): float(dram.num_used * slot_bytes),
        ("capacity_bytes", DRAM): float(dram.num_slots * slot_bytes),
        **tenant_gauges(context.residency, slot_bytes, tiers[0].record_bytes),
    }
    gauges |= {("dram_curve_ratio", n): share for n, share in curve.by_times()}
    for io in tiers:
        gauges |= io.gauges_now()
        gauges["dirty_bytes", io.tier.name] = float(len(io.tier.waiting) * slot_bytes)
    return gauges
