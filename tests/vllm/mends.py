# SPDX-License-Identifier: Apache-2.0
"""Mends of faults that once served wrong KV, each taken out again, in an engine's process.

Some stay out while a context lasts; those without an undo are for EngineSpec.before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from blake3 import blake3

from attnstore_vllm.connector import build, connector
from attnstore_vllm.identity import live_facts, namespace
from attnstore_vllm.index.keys import media_content
from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.scheduler import media
from attnstore_vllm.scheduler.adapters import NO_ADAPTER, Adapters, _Names
from attnstore_vllm.scheduler.media import MediaNames
from attnstore_vllm.scheduler.reset_watch import ResetWatch
from attnstore_vllm.store.store import Store

Out = AbstractContextManager[object]

# ---- adapters -------------------------------------------------------------------------------


@contextmanager
def adapters_by_their_files() -> Iterator[None]:
    """An adapter's name is the digest of its files when a request comes."""

    def identity(_: Adapters, lora: Any) -> bytes:
        if lora is None:
            return NO_ADAPTER
        return blake3((Path(lora.lora_path) / "adapter_model.safetensors").read_bytes()).digest()

    with (
        mock.patch.object(Adapters, "identity", identity),
        mock.patch.object(Adapters, "answer", lambda self, lora, _: (identity(self, lora), False)),
    ):
        yield


@contextmanager
def adapters_known_for_good() -> Iterator[None]:
    """What workers once said of an id holds for ever."""
    known: dict[int, bytes] = {}
    ask = Adapters.identity

    def identity(self: Adapters, lora: Any) -> bytes | None:
        found = ask(self, lora)
        if lora is None or found is None:
            return found
        return known.setdefault(lora.lora_int_id, found)

    plain = Adapters.answer

    def answer(self: Adapters, lora: Any, asked: Any) -> tuple[bytes | None, bool]:
        found = known.get(lora.lora_int_id)
        return plain(self, lora, asked) if found is None else (found, False)

    with (
        mock.patch.object(Adapters, "identity", identity),
        mock.patch.object(Adapters, "answer", answer),
    ):
        yield


def names_of_one() -> Out:
    """A name in vLLM's prefix cache is taken for the adapter that has it now."""
    return mock.patch.object(_Names, "saw", return_value=False)


# ---- weights --------------------------------------------------------------------------------


def no_look() -> Out:
    """No worker looks whether its weights are what they were."""
    return mock.patch.object(ResetWatch, "must_wait", return_value=False)


def never_look() -> None:
    no_look().__enter__()


def sleeps_keep_all() -> Out:
    """What is not copied before a sleep is copied behind it."""
    return mock.patch.object(Store, "drop", return_value=None)


def weights_by_size_and_time() -> None:
    def identify(config: Any, *_: Any) -> tuple[str, bytes]:
        file = Path(config.model_config.model) / "model.safetensors"
        found = file.stat()
        return "", blake3(f"{found.st_size} {found.st_mtime_ns}".encode()).digest()

    mock.patch.object(build, "identify", identify).start()


# ---- the namespace --------------------------------------------------------------------------


def tables_left_out() -> None:
    mock.patch.object(live_facts, "_digest_tables", return_value="").start()


def kernels_left_out(isa: str) -> None:
    """The order of bytes that kernels write is not in the namespace.

    Args:
        isa: as vLLM calls the kernels of this machine: others have another order.
    """
    from vllm.v1.attention.backends import cpu_attn

    mock.patch.object(live_facts, "_digest_written", return_value="").start()
    mock.patch.object(live_facts, "_digest_attention", return_value="").start()
    mock.patch.object(connector, "_kernel_of", return_value="").start()
    mock.patch.object(cpu_attn, "_get_attn_isa", return_value=isa).start()


MODEL = """
from vllm.model_executor.models.llama import LlamaForCausalLM


class MyLlama(LlamaForCausalLM):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            attention = layer.self_attn.forward
            layer.self_attn.forward = lambda *a, f=attention, **k: FACTOR * f(*a, **k)
"""


def code_left_out(directory: Path, factor: float) -> None:
    """The code of the model's class is not in the namespace.

    Args:
        directory: where the class is written.
        factor: by which its code multiplies what attention gives.
    """
    from vllm import ModelRegistry

    (directory / "my_model.py").write_text(MODEL.replace("FACTOR", str(factor)))
    sys.path.insert(0, str(directory))
    os.environ["PYTHONPATH"] = f"{directory}:{os.environ['PYTHONPATH']}"
    ModelRegistry.register_model("MyLlama", "my_model:MyLlama")
    mock.patch.object(live_facts, "_digest_code", return_value="").start()


# ---- media ----------------------------------------------------------------------------------


def _by_name(name: bytes, digest: bytes, *rest: Any) -> bytes:
    return media_content(name, b"", *rest)


def media_by_name() -> None:
    """A name of an input is taken for its content."""
    mock.patch.object(media, "media_content", _by_name).start()


def media_by_counter() -> None:
    """So is one that vLLM's counter made."""
    media_by_name()
    mock.patch.object(media, "is_counted", return_value=False).start()
    mock.patch.object(build, "counts_media", return_value=False).start()


def processors_left_out() -> None:
    """Nor do the processor's files count."""
    media_by_name()
    mock.patch.object(namespace, "files_of", return_value={}).start()


def names_outlive_weights() -> Out:
    """An input keeps its name under new weights."""
    return mock.patch.object(MediaNames, "weights_changed", return_value=None)


# ---- moved KV -------------------------------------------------------------------------------


def moved_is_native() -> Out:
    """Moved KV is a source of further moves."""
    plain: Callable[..., None] = MovedKv.note

    def note(self: MovedKv, name: Any, domain: Any, _: int, *, is_exact: bool) -> None:
        plain(self, name, domain, 0, is_exact=is_exact)

    return mock.patch.object(MovedKv, "note", note)
