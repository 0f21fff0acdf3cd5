# SPDX-License-Identifier: Apache-2.0
"""How much of a load must be over before the forward pass starts. Pure: times are given.

    layer i of L        arrives at (i + 1) * load / L       after the load began
                        is needed at i * compute / L        after the forward pass began

A forward pass that starts with k layers in HBM, k * load / L after the load began, waits for
none of the others if (i - k + 1) * load <= i * compute for each i from k to L - 1. This is the
read buffer of CachedAttention (ATC'24), section 3.2.1, S_buf = B * (T_load * L_hist - T_pref *
L_new), counted in layers: B * T_load * L_hist are the bytes of the load, so S_buf is about
L * (1 - compute / load) of its L layers. The blocks of the request itself are the buffer.
"""

from __future__ import annotations

import math

WRITE_BUFFER_SHARE = 0.02
"""The most of the device's memory that the write buffer takes."""


def layers_before(load_s: float, compute_s: float, num_layers: int) -> int:
    """How many layers must be in HBM before the forward pass starts, so that it waits for none.

    The smallest k in [0, L] with (i - k + 1) * load_s <= i * compute_s for all i in [k, L).
    The left side grows with i by load_s, the right one by compute_s. If the load is the shorter
    one, i = k decides, and one layer is enough; if it is the longer one, i = L - 1 decides, and
    k is L - floor((L - 1) * compute_s / load_s).

    Args:
        load_s, compute_s: of all layers; measured, so either may be nothing or worse.
        num_layers: L.
    Returns: 0 (load in the step itself, layer by layer) where k is 1 at most: then all but the
        first layer are hidden. L where nothing is known of the two (NaN, both endless), since
        who has all layers waits for none.
    """
    if num_layers <= 1 or load_s <= 0 or (compute_s >= load_s and math.isfinite(load_s)):
        return 0
    if compute_s <= 0 or not (math.isfinite(load_s) and math.isfinite(compute_s)):
        return num_layers
    # In integers, since a quotient that is rounded up would be a layer too few.
    load, load_unit = load_s.as_integer_ratio()
    compute, compute_unit = compute_s.as_integer_ratio()
    hidden = (num_layers - 1) * compute * load_unit // (load * compute_unit)
    return num_layers - hidden


def default_write_buffer_bytes(
    token_bytes_per_rank: float,
    max_batched_tokens: int,
    chunk_bytes_per_rank: int,
    device_bytes: int,
) -> int:
    """HBM for what is saved and not yet in DRAM: whole chunks, at least one.

    Room for what two steps compute, so that one step fills while the other drains, but no more
    than 2 % of the device.
    """
    wanted = 2 * max_batched_tokens * token_bytes_per_rank
    most = min(wanted, WRITE_BUFFER_SHARE * device_bytes)
    return max(1, int(most // chunk_bytes_per_rank)) * chunk_bytes_per_rank
