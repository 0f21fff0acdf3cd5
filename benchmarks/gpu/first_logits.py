# SPDX-License-Identifier: Apache-2.0
"""Time to the first logits of a turn whose history is in page-locked memory, over the same with the
history in HBM.

    in HBM       the forward pass alone
    whole        all of the history is loaded, then the forward pass
    layer-wise   each layer waits for its own part
    k layers     layer-wise, with the first k layers there before: those that policy/cost.py
                 would have a load ahead bring before its request is told

Before each round but those in HBM the blocks are overwritten, so a layer that did not wait gives
other logits; they are compared, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from attnstore_vllm.policy.cost import layers_before
from benchmarks.gpu.rig import BLOCK_TOKENS, KvRig, KvShape, Row, in_turn, seconds
from benchmarks.gpu.transformer import ModelShape, Transformer

AT_MOST = 1.10


class Turn:
    """One conversation's next turn, whose history is in the slots of the rig."""

    def __init__(self, shape: ModelShape, history: int, new: int) -> None:
        kv_shape = KvShape("", shape.layers, shape.kv_heads, shape.head_dim)
        self.rig = KvRig(kv_shape, history, num_rows=0)
        device = self.rig.device
        self.model = Transformer(shape, torch.bfloat16, device)
        self.layers = range(shape.layers)
        self._tokens = torch.randint(0, shape.vocabulary, (new,), device=device)
        self._mask = self.model.causal_mask(history, new, device)
        own = self.rig.free_blocks[: new // BLOCK_TOKENS]
        self._history = torch.from_numpy(self.rig.pages[:, 2].copy()).to(device)
        self._blocks = torch.cat((self._history, torch.from_numpy(own.copy()).to(device)))
        for kv in self.rig.kv:
            kv.normal_()
        self.rig.engine.wait(self.rig.engine.save(self.rig.pages, self.layers))
        self.found: dict[str, torch.Tensor] = {}

    def forget(self, layers: range) -> None:
        """As if these layers' blocks were somebody else's before."""
        for layer in layers:
            self.rig.kv[layer][self._history] = 100.0

    def forward(self, before_attention: Callable[[int], None]) -> torch.Tensor:
        return self.model.logits(
            self._tokens, self.rig.kv, self._blocks, self._mask, before_attention
        )

    def in_hbm(self) -> None:
        self.found["in HBM"] = self.forward(lambda _: None).cpu()

    def whole(self) -> None:
        engine = self.rig.engine
        engine.model_waits(engine.load(self.rig.pages, self.layers))
        self.found["whole"] = self.forward(lambda _: None).cpu()

    def by_layer(self, how: str, there: int = 0) -> None:
        engine = self.rig.engine
        events = {
            layer: engine.load(self.rig.pages, range(layer, layer + 1))
            for layer in self.layers[there:]
        }

        def before_attention(layer: int) -> None:
            if layer in events:
                engine.model_waits(events[layer])

        self.found[how] = self.forward(before_attention).cpu()


def measure(shape: ModelShape, history: int, new: int, rounds: int) -> list[Row]:
    turn = Turn(shape, history, new)
    try:
        with torch.inference_mode():
            return _rows(turn, history, new, rounds)
    finally:
        turn.rig.close()


def _rows(turn: Turn, history: int, new: int, rounds: int) -> list[Row]:
    compute_s = in_turn([turn.in_hbm], rounds)[0]
    load = partial(turn.rig.engine.load, turn.rig.pages, turn.layers)
    (load_s,) = in_turn([load], rounds)
    k = layers_before(load_s, compute_s, len(turn.layers))
    buffered = f"layer-wise, {k} of {len(turn.layers)} layers there"
    ways: list[tuple[str, range, Callable[[], None]]] = [
        ("in HBM", range(0), turn.in_hbm),
        ("whole", turn.layers, turn.whole),
        ("layer-wise", turn.layers, partial(turn.by_layer, "layer-wise")),
        (buffered, turn.layers[k:], partial(turn.by_layer, buffered, k)),
    ]
    times: dict[str, list[float]] = {name: [] for name, _, _ in ways}
    for number in range(rounds + 1):
        for name, layers, work in ways:
            turn.rig.engine.wait(load())  # whatever the way before has left
            turn.forget(layers)
            took = seconds(work)
            if number:
                times[name].append(took)
    median = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
    what = f"first logits, {history} tokens in DRAM + {new} new"
    detail = f"a load takes {load_s * 1000:.1f} ms, the pass {compute_s * 1000:.1f} ms"
    rows = []
    for name, took in median.items():
        off = (turn.found[name] - turn.found["in HBM"]).abs().max().item()
        rows.append(
            Row(
                what, name, took / median["in HBM"], AT_MOST if name == "layer-wise" else None,
                at_most=True, is_wrong=off != 0.0,
                detail=f"{took * 1000:.1f} ms; {f'LOGITS ARE OFF BY {off}' if off else detail}",
            )
        )  # fmt: skip
    return rows
