# SPDX-License-Identifier: Apache-2.0
"""A worker whose model can be left out, to fill HBM and the store with KV in no time.

Where it is only measured how long KV takes from one place to another, what is in it does not
matter; computing 16,000 tokens eight times would take an hour.
"""

from __future__ import annotations

from typing import Any

import torch


class Filling:
    """For vLLM's --worker-extension-cls: called by POST /collective_rpc."""

    model_runner: Any

    def attnstore_fill(self, step: str) -> None:
        """begin: all KV in HBM is made random, and forward passes compute nothing from here on.
        end: they compute as usual."""
        model = self.model_runner.model
        if step == "end":
            del model.forward
            return
        assert step == "begin"
        for kv in self.model_runner.kv_caches:
            kv.copy_(torch.randn(kv.shape[1:]))  # the same in each block
        hidden, dtype = model.config.hidden_size, next(model.parameters()).dtype

        def forward(*_: Any, positions: torch.Tensor, **__: Any) -> torch.Tensor:
            return torch.zeros(positions.shape[-1], hidden, dtype=dtype)

        model.forward = forward
