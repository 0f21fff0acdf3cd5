# SPDX-License-Identifier: Apache-2.0
"""The model that a worker has in memory, reached from its attention layers.

A connector is given no handle of the model. vLLM's configuration names the attention layers; the
modules that hold them, and so the whole model, are found among the objects of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch


def model_of(layers: Iterable[object]) -> list[torch.nn.Module]:
    """The outermost modules that hold these layers: one, unless a layer has several holders.

    Other models of the process are left out: nothing but the layers themselves leads here.
    Cost: one look at all objects of the process, some tenths of a second. Not after vLLM has taken
    them out of the garbage collector's sight, which it does when it has started.
    """
    holders: dict[int, list[torch.nn.Module]] = {}
    for holder in [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]:
        for member in holder._modules.values():
            holders.setdefault(id(member), []).append(holder)
    todo = [layer for layer in layers if isinstance(layer, torch.nn.Module)]
    seen = {id(module) for module in todo}
    tops: list[torch.nn.Module] = []
    while todo:
        module = todo.pop()
        above = holders.get(id(module), [])
        if not above:
            tops.append(module)
        for holder in above:
            if id(holder) not in seen:
                seen.add(id(holder))
                todo.append(holder)
    return tops
