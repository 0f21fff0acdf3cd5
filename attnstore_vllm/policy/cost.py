# SPDX-License-Identifier: Apache-2.0
"""Which is sooner: to wait for stored KV, or to compute it? Learned online, pure: time is given.

It is long since what a step, a read and a copy cost is weighed together.

    compute(a, b) = c1 * (b - a) + c2 * (b - a) * (a + b) / 2       seconds for tokens [a, b)
    arrival(k)    = reads that are before it * seconds a read       until piece k is in DRAM

The c are fitted to the lengths of the engine's own steps (least squares, recent ones count more),
the seconds of a read to the disk's own completions. Both come with their spread, and the doubt
speaks for computing: what is waited for must come sooner even if the disk is a spread slower, and
computing a spread faster, than they are on the mean. As long as one of the two was not
seen often enough, nothing is said, and a request waits until its deadline. What a copy from DRAM
costs is a mean without a spread.

A measurement far from the others counts only in part: a machine that was paused for a minute has
taught nothing. If such ones keep coming they count in full, after a few of them.

How much of a load must be over before the forward pass starts follows from the same times:

    layer i of L        arrives at (i + 1) * load / L       after the load began
                        is needed at i * compute / L        after the forward pass began

A forward pass that starts with k layers in HBM, k * load / L after the load began, waits for
none of the others if (i - k + 1) * load <= i * compute for each i from k to L - 1. This is the
read buffer of CachedAttention (ATC'24), section 3.2.1, S_buf = B * (T_load * L_hist - T_pref *
L_new), counted in layers: B * T_load * L_hist are the bytes of the load, so S_buf is about
L * (1 - compute / load) of its L layers. The blocks of the request itself are the buffer.

A load ahead has a price: its request begins AHEAD_STEPS steps of the others later than its layers
would let it. What it saves is the time for which the load would hold up its step, and all others in
it. Who is alone pays nothing and saves nothing, so its loads are for their steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

READS_MIN = 8
STEPS_MIN = 8
"""Before so many were seen nothing is said."""
READS_KEPT = 256
STEPS_KEPT = 256
"""About so many count; what was before is forgotten."""
OUTLIER = 4.0
"""A step counts as at most so many times its forecast, and at least as such a part of it:
compilation, a stopped process, a step that ended unseen. So does a load."""
LOADS_MIN = 8
LOADS_KEPT = 64
"""As READS_MIN and READS_KEPT, of loads that are over."""
FORGIVEN_AFTER = 16
"""Usual measurements after which an outlier is one that stands alone."""
AHEAD_STEPS = 4
"""Steps of others between a load ahead and its request's first one, where steps are planned while
others are computed. The load comes behind the step before its own. A worker sees that it is over
when it has launched a later step, whose output brings the news. The request's step is planned
behind the one under way. Derived and not measured."""
USUAL_STEPS = 8
"""About so many count for how long a step takes now."""
REFIT_STEPS = 8
PROBE_EVERY = 32

_SCALE = np.array([1.0, 1e-3, 1e-6, 1e-2])


class Bound:
    """How much of a measurement counts, if it is far above what is usual.

    One that stands alone counts as OUTLIER times that. Each that comes soon after raises the bound
    by the same factor: so a change that stays is learned from the third or fourth on, and so
    are outliers that are more frequent than one in FORGIVEN_AFTER.
    """

    def __init__(self) -> None:
        self._times = OUTLIER

    def counted(self, seconds: float, usual: float) -> float:
        """The part of `seconds` that is to be learned from."""
        if usual <= 0 or seconds <= OUTLIER * usual:
            self._times = max(OUTLIER, self._times / OUTLIER ** (1 / FORGIVEN_AFTER))
            return seconds
        counted = min(seconds, self._times * usual)
        self._times = min(OUTLIER * self._times, 1e9)
        return counted


class ReadCost:
    """Seconds a read of one chunk takes when reads follow each other."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._variance = 0.0
        self._bound = Bound()

    @property
    def mean_s(self) -> float | None:
        return self._mean if self._count >= READS_MIN else None

    def observe(self, seconds: float) -> None:
        """A read has ended, so long after the one before it, or after it was begun."""
        if self._count >= READS_MIN:
            # Reads end in bursts: what is usual has their spread in it.
            seconds = self._bound.counted(seconds, self._mean + math.sqrt(self._variance))
        self._count += 1
        part = max(1 / self._count, 1 / READS_KEPT)
        error = seconds - self._mean
        self._mean += part * error
        self._variance = (1 - part) * (self._variance + part * error * error)

    def seconds(self, num_reads: int) -> float:
        """For so many in a row, with a spread on top."""
        return num_reads * self._mean + math.sqrt(num_reads * self._variance)


class ReadsInTime:
    """How much of what waiting requests want from the tiers behind has come when they run."""

    def __init__(self) -> None:
        self._late = 0.0
        self._all = self._unknown = float(READS_MIN)

    def late(self, guess: float = 0.0) -> float:
        """The share that has not. About the last READS_KEPT count.

        Args:
            guess: of the share, which counts as READS_MIN do that were seen first.
        """
        return (self._late + guess * self._unknown) / self._all

    def observe(self, came: int, late: int) -> None:
        """So many chunks that a request wanted had come when it ran, and so many not."""
        keep = 1 / (1 + (came + late) / READS_KEPT)
        self._unknown *= keep
        self._late = keep * self._late + late
        self._all = keep * self._all + came + late


class QueuePace:
    """Seconds between two requests that leave the waiting queue, while more wait behind them."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0
        self._left = float(READS_MIN)

    @property
    def mean_s(self) -> float:
        """0 before anything is known."""
        return self._seconds / self._left

    def left(self, number: int, has_more: bool, now: float) -> None:
        """So many have left the queue."""
        if not number:
            return
        if self._since is not None:
            keep = 1 / (1 + number / READS_KEPT)
            self._seconds = keep * self._seconds + now - self._since
            self._left = keep * self._left + number
        self._since = now if has_more else None


class CopyCost:
    """Seconds that a step waits for a token's KV to be copied from DRAM into HBM: what is hidden
    behind the step's own computation costs nothing."""

    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []
        self._asked = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._bound = Bound()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step has waited so long for its copies, of so many tokens; both above 0."""
        if len(self._first) < READS_MIN:
            self._first.append((num_tokens, seconds))
            if len(self._first) == READS_MIN:
                usual = statistics.median(waited / tokens for tokens, waited in self._first)
                for tokens, waited in self._first:
                    self._add(tokens, self._bound.counted(waited, usual * tokens))
        else:
            usual = self._seconds / self._tokens
            self._add(num_tokens, self._bound.counted(seconds, usual * num_tokens))

    def _add(self, num_tokens: int, seconds: float) -> None:
        self._tokens += num_tokens - self._tokens / READS_KEPT
        self._seconds += seconds - self._seconds / READS_KEPT

    def pays(self, start: int, stop: int, steps: StepCost, ahead_s: float | None = None) -> bool:
        """Whether copying tokens [start, stop) costs no more than computing them, if known.

        Now and then it is said to pay without a look: only who copies sees what it costs.

        Args:
            ahead_s: what a load ahead of its step takes (ahead_seconds): no step waits for it, so
                that none has told. None: the load is for its step.
        """
        if not steps.is_known or (ahead_s is None and len(self._first) < READS_MIN):
            return True
        self._asked += 1
        copying = ahead_s
        if copying is None:
            copying = (stop - start) * self._seconds / self._tokens
        return self._asked % PROBE_EVERY == 0 or copying <= steps.seconds(start, stop, 1.0)


class LoadRate:
    """Seconds a byte takes from DRAM to HBM, learned from loads that are over.

    Each load counts by its bytes: what a copy costs to begin with must not hide in the rate.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._count = 0
        self._weight = 0.0
        self._mean = 0.0  # seconds a byte

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A load is over. One of no bytes or in no time says nothing."""
        if num_bytes <= 0 or not 0 < seconds < math.inf:
            return
        rate = seconds / num_bytes
        if self.is_known:
            rate = min(max(rate, self._mean / OUTLIER), self._mean * OUTLIER)
        self._count += 1
        keep = 1 - 1 / LOADS_KEPT
        self._weight = keep * self._weight + num_bytes
        self._mean += (rate - self._mean) * num_bytes / self._weight
        self.is_known = self._count >= LOADS_MIN

    def seconds(self, num_bytes: int) -> float:
        """For a load of so many bytes, on the mean. Ask `is_known` first."""
        return num_bytes * self._mean


class StepCost:
    """Seconds that computing tokens adds to a step.

    A step takes c0 + c1 * tokens + c2 * tokens * context + c3 * sequences that generate.
    """

    def __init__(self) -> None:
        self.is_known = False
        # Steps with a prompt in them and those without are forgotten apart: a long answer must not
        # take what prompts cost away.
        self._sums = [np.zeros((4, 5)), np.zeros((4, 5))]
        self._found = np.zeros(4)
        self._parts = (0.0, 0.0, 0.0, 0.0)
        """The same as parts() says it: numbers, since arrays of four take longer than the sum."""
        self._spread = 0.0
        self._num_wrong = 0
        self._num_steps = 0
        self._since_fit = 0

    def observe(
        self, seconds: float, prompts: Sequence[tuple[int, int]], num_generating: int
    ) -> float | None:
        """A step has ended.

        Args:
            prompts: [start, stop) of the prompt tokens that it computed.
        Returns: by which part of its length the forecast was wrong, if prompts were computed and
            there was a forecast.
        """
        tokens = sum(stop - start for start, stop in prompts)
        products = sum((stop - start) * (start + stop) / 2 for start, stop in prompts)
        row = _SCALE * (1.0, tokens, products, num_generating)
        wrong = None
        forecast = float(row @ self._found) if self.is_known else 0.0
        if forecast > 0:
            seconds = min(max(seconds, forecast / OUTLIER), OUTLIER * forecast)
        if forecast > 0 and prompts:
            wrong = (seconds - forecast) / forecast
            self._num_wrong += 1
            part = max(1 / self._num_wrong, 2 / STEPS_KEPT)
            self._spread += (wrong * wrong - self._spread) * part
        weight = 1 / max(seconds, forecast, 1e-6) ** 2  # errors count by their part of the step
        sums = self._sums[bool(prompts)]
        sums *= 1 - 1 / STEPS_KEPT
        sums[:, :4] += weight * (row[:, None] * row)
        sums[:, 4] += weight * (row * seconds)
        self._num_steps += bool(prompts)
        self._since_fit += 1
        if prompts and (self._since_fit >= REFIT_STEPS or self._num_steps == STEPS_MIN):
            self._fit()
            self.is_known = self._num_steps >= STEPS_MIN
        return wrong

    def seconds(self, start: int, stop: int, spreads: float = 0.0) -> float:
        """For computing tokens [start, stop), with so many spreads on top; negative: below, and
        never nothing, in any doubt."""
        tokens = stop - start
        _, token_s, context_s, _ = self._parts
        mean = token_s * tokens + context_s * tokens * (start + stop) / 2
        if not spreads:
            return mean
        doubt = 1 + abs(spreads) * math.sqrt(self._spread)
        return mean * doubt if spreads >= 0 else mean / doubt

    def parts(self) -> tuple[float, float, float, float]:
        """Seconds of a step, of a token, of a token and token before it, of a sequence that
        generates."""
        return self._parts

    def step_seconds(self, start: int, stop: int) -> float:
        """Seconds of a whole step that computes tokens [start, stop), on the mean."""
        return self._parts[0] + self.seconds(start, stop)

    def _fit(self) -> None:
        """Least squares over what no step can have less than none of."""
        self._since_fit = 0
        sums = self._sums[0] + self._sums[1]
        square, right = sums[:, :4], sums[:, 4]
        ridge = 1e-9 * np.trace(square) / 4
        used = [0, 1, 2, 3]
        while used:
            part = square[np.ix_(used, used)] + ridge * np.eye(len(used))
            found = np.linalg.solve(part, right[used])
            if found.min() >= 0:
                whole = np.zeros(4)
                whole[used] = found
                self._found = whole
                step, token, context, sequence = (whole * _SCALE).tolist()
                self._parts = (step, token, context, sequence)  # at once: other threads read it
                return
            used.pop(int(found.argmin()))


def pieces_to_wait_for(
    ready_stop: int, stops: Sequence[int], arrivals_s: Sequence[float], steps: StepCost
) -> int:
    """How many of the pieces that are on their way a request should wait for.

    Those with which the first token comes soonest: each takes its arrival, and saves the
    computation of all up to it.

    Args:
        ready_stop: token up to which KV is in DRAM now.
        stops: where the following pieces end, in their order.
        arrivals_s: seconds until each is in DRAM, rising.
    """
    best, gain = 0, 0.0
    for number, (stop, arrival_s) in enumerate(zip(stops, arrivals_s, strict=True), start=1):
        saved = steps.seconds(ready_stop, stop, -1.0) - arrival_s
        if saved > gain:
            best, gain = number, saved
    return best


def read_pays(
    reads: tuple[int, int], read_s: float, turn_s: float, computing_s: tuple[float, float]
) -> bool:
    """Whether a read may be of use to a waiting request.

    It is if the request would have to wait for it, at its turn, less than it would have to compute;
    or, since that grows faster than the number of reads, for it and all that is to follow.

    Args:
        reads: until this one has ended, and until all of the request's have.
        read_s: of one.
        turn_s: until the request runs.
        computing_s: for what is stored up to this one's end, and up to that of all.
    """
    ends = (number * read_s - turn_s for number in reads)
    return any(end <= seconds for end, seconds in zip(ends, computing_s, strict=True))


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


def ahead_pays(
    load_s: float, compute_s: float, num_layers: int, others: int, step_s: float
) -> bool:
    """Whether a load ahead costs all requests together less than one that holds up its step.

    Args:
        load_s, compute_s, num_layers: as in layers_before().
        others: requests that run.
        step_s: how long their steps take.
    """
    exposed_s = load_s - compute_s * (num_layers - 1) / num_layers
    return others * exposed_s > AHEAD_STEPS * step_s


def ahead_seconds(load_s: float, layers: int, num_layers: int, step_s: float) -> float:
    """Until a request begins of whose load so many layers come ahead of its first step."""
    return load_s * layers / num_layers + AHEAD_STEPS * step_s


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
