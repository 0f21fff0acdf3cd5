# SPDX-License-Identifier: Apache-2.0
"""Native shapes from one dictionary of numbers, for tests that change single ones."""

from __future__ import annotations

from typing import Any

from attnstore_vllm import _native

ROTATION = {
    "key",
    "value",
    "num_heads",
    "head_dim",
    "block_tokens",
    "dtype",
    "is_neox",
    "theta",
}
ON_DEVICE = {"kernels", "arrays"}


def copier(numbers: dict[str, Any]) -> _native.PageCopier:
    return _native.PageCopier(_native.PageShape(**numbers))


def rotator(numbers: dict[str, Any], native: Any = _native) -> Any:
    """Args: native: the module; that of CUDA takes the numbers of ON_DEVICE too."""
    turned = {name: value for name, value in numbers.items() if name in ROTATION}
    on_device = {name: value for name, value in numbers.items() if name in ON_DEVICE}
    rest = numbers.keys() - turned.keys() - on_device.keys()
    pages = native.PageShape(**{name: numbers[name] for name in rest})
    return native.PageRotator(pages, native.RotationShape(**turned), **on_device)
