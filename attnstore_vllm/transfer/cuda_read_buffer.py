# SPDX-License-Identifier: Apache-2.0
"""The read buffer in HBM: loads on their way from slots to blocks. The mirror of the write buffer.

A chunk's layer is contiguous in its slot and scattered over its blocks. So it is *filled* into a
span of the buffer by DMA, in runs as long as the slot has them, and *scattered* to its blocks by
the kernel, which then reads HBM and not DRAM over PCIe. Where slots keep pages encoded, a span has
their cells, and the kernel decodes them.

    span = pages of one layer, or their cells, one after the other, in the order of the load

Fills have a stream of their own, so that one goes beside the scatter before it. A scatter waits for
its fill; a fill waits for the scatter that read its span last. Spans are used by turns. What a load
waits for before it begins, its fills wait for too: the time that it takes is then its own.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from attnstore_vllm.config.values import format_size
from attnstore_vllm.transfer.cuda_batches import BatchPart
from attnstore_vllm.transfer.cuda_methods import Copy, Method, ReadOrder, Rule, Rules
from attnstore_vllm.transfer.cuda_tables import TableRing

logger = logging.getLogger(__name__)


class ReadSize(NamedTuple):
    """The size of a read buffer."""

    num_spans: int
    span_bytes: int
    """A multiple of 16."""

    @property
    def num_bytes(self) -> int:
        return self.num_spans * self.span_bytes


# NEVER MEASURED: no GPU has run this. A span takes 0.15 ms at 55 GB/s, which is long beside what
# the calls for it cost, and several are on their way at once.
READ_SIZE = ReadSize(8, 8 << 20)
NO_SPANS = ReadSize(0, 0)


class ReadBuffer:
    """Appends loads through the buffer to two streams.

    Args:
        memory: of `size`, on the device.
        fills, loads: the streams; of `loads`, the caller takes its events.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        size: ReadSize,
        fills: torch.cuda.Stream,
        loads: torch.cuda.Stream,
    ) -> None:
        self.size = size
        self.fills = fills
        self._memory = memory
        self._loads = loads
        self._until: list[torch.cuda.Event | None] = [None] * size.num_spans
        """Behind the latest scatter out of each span."""
        self._next = 0
        self._start: torch.cuda.Event | None = None
        """Fills come after it, and have not been given since it was told."""

    def place(self) -> tuple[int, int, int]:
        """Address, bytes of a span, and spans, for the native code."""
        return self._memory.data_ptr(), self.size.span_bytes, self.size.num_spans

    def comes_after(self, event: torch.cuda.Event) -> None:
        """Begin what is filled from here on behind this."""
        self._start = event

    def give(
        self,
        copier: Any,
        rule: Rule,
        part: BatchPart,
        layers: range,
        ring: TableRing,
        failed: int = 0,
    ) -> None:
        """Append a load of these layers. Raises RuntimeError if CUDA refuses it.

        Args:
            failed: where pages are decoded on the way out of a span, of a LoadWord.
        """
        if not part.fills:
            return
        loads = self._loads.cuda_stream
        staged = ring.stage(part.words, loads)
        # Ahead of the fills, behind which it would wait for the copy engine.
        copier.bring(part.native, staged.device, staged.host, loads)
        ring.was_given()
        if self._start is not None:
            self.fills.wait_event(self._start)
            self._start = None
        for layer in layers:
            for fill in part.fills:
                span = self._take()
                copier.fill(
                    fill.native, layer, span, rule.order is ReadOrder.ANY, self.fills.cuda_stream
                )
                self._loads.wait_event(self.fills.record_event())
                copier.scatter(
                    part.native,
                    layer,
                    fill.first,
                    fill.num_pages,
                    span,
                    staged.device,
                    rule.thread_blocks,
                    loads,
                    failed,
                )
                self._until[span] = self._loads.record_event()

    def _take(self) -> int:
        """The next span; what is given to the stream of fills from here on comes behind what has
        read it."""
        span, self._next = self._next, (self._next + 1) % len(self._until)
        if (event := self._until[span]) is not None:
            self.fills.wait_event(event)
        return span

    def synchronize(self) -> None:
        """Return when no fill is in flight."""
        self.fills.synchronize()


def make_read_buffer(
    device: torch.device,
    size: ReadSize | None,
    rules: Rules,
    fills: torch.cuda.Stream,
    loads: torch.cuda.Stream,
    *,
    is_encoded: bool = False,
) -> ReadBuffer:
    """The read buffer of an engine. Where HBM has no room for it, it has no spans.

    Args:
        size: None: READ_SIZE if a rule says that loads go through it, or they are decoded; else
            none.
    """
    if size is None:
        is_asked = is_encoded or any(rule.method is Method.BUFFER for rule in rules[Copy.LOAD])
        size = READ_SIZE if is_asked else NO_SPANS
    try:
        memory = torch.empty(size.num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        logger.warning(
            "%s of HBM are not free for the read buffer (%s): loads go without it",
            format_size(size.num_bytes),
            error,
        )
        size, memory = NO_SPANS, torch.empty(0, dtype=torch.uint8, device=device)
    return ReadBuffer(memory, size, fills, loads)
