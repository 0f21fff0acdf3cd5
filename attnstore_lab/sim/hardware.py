# SPDX-License-Identifier: Apache-2.0
"""The machine and the model that a simulation assumes: speeds, sizes, bandwidths. From a YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from attnstore_vllm.config.values import check_keys, load_yaml, parse_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.model_shape import KvShape
from attnstore_vllm.transfer.geometry import Geometry

_SIZES = {
    "kv_bytes_per_token",
    "hbm",
    "dram",
    "nvme",
    "hbm_bandwidth",
    "nvme_read",
    "nvme_write",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All of one data-parallel engine. Sizes are bytes, bandwidths bytes a second."""

    kv_bytes_per_token: int
    hbm: int
    """For KV, of running requests and, with `prefix_cache`, of what stays behind them."""
    dram: int
    nvme: int
    prefill_tokens_per_s: float
    """At the beginning of a prompt ..."""
    prefill_context: float = float("inf")
    """... and half as fast after so many tokens."""
    decode_step_s: float
    """A step that generates one token for each running request ..."""
    decode_sequence_s: float = 0.0
    """... and what each of them adds."""
    max_num_seqs: int = 24
    max_num_batched_tokens: int = 2048
    prefix_cache: bool = True
    """vLLM's own, in HBM."""
    hbm_bandwidth: int = 26_000_000_000
    """DRAM to HBM, and back."""
    overlap: bool = True
    """Loads hide behind the step's computation, layer by layer."""
    asynchronous_saving: bool = True
    """Saves hide behind the steps that follow; else the engine waits for them after each step."""
    nvme_read: int = 5_000_000_000
    nvme_write: int = 2_500_000_000
    nvme_latency_s: float = 0.0002
    nvme_record_size: float = 1.0
    """The size of a record on NVMe over that in DRAM: below 1 with nvme.codec."""
    chunk_tokens: int = 256
    io_depth: int = 8
    load_deadline_s: float = 1.0
    states_every: int | None = None
    """The store's setting."""
    shape: KvShape | None = None
    """The shape that a given config.json says; None: its KV is one group."""

    @classmethod
    def parse(cls, given: object, where: str) -> Machine:
        """Raises ConfigError that names the key, what was found and what would be right."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where}: {given!r} was found; expected settings, as dram: 128GB")
        known = {f.name for f in fields(cls)} - {"shape"}
        required = {
            "kv_bytes_per_token",
            "hbm",
            "dram",
            "nvme",
            "prefill_tokens_per_s",
            "decode_step_s",
        }
        check_keys(f"{where}: ", given, known, set())
        for key in sorted(required - set(given)):
            raise ConfigError(f"{where}: {key} is missing; docs/simulate.md has an example")
        return cls(**{key: _value(where, key, value) for key, value in given.items()})

    @classmethod
    def read(cls, path: Path) -> Machine:
        try:
            given = load_yaml(path.read_text())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; a server's recorder writes machine.yaml "
                "once it has measured the engine's steps (docs/operations.md)"
            ) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not YAML: {error}") from error
        return cls.parse(given, str(path))

    def with_sizes(self, **sizes: int) -> Machine:
        return replace(self, **sizes)  # type: ignore[arg-type]

    def with_model(self, shape: KvShape) -> Machine:
        geometry = shape.geometry
        return replace(
            self,
            shape=shape,
            chunk_tokens=geometry.chunk_tokens,
            kv_bytes_per_token=-(-geometry.slot_bytes // geometry.chunk_tokens),
        )

    @property
    def geometry(self) -> Geometry:
        """Without a model's shape a chunk is one block."""
        if self.shape is not None:
            return self.shape.geometry
        return Geometry.uniform(
            num_ranks=1,
            num_layers=1,
            block_tokens=self.chunk_tokens,
            page_bytes=self.chunk_bytes,
            chunk_tokens=self.chunk_tokens,
        )

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes of a request in HBM, and of what is copied there for a hit of so many tokens."""
        if self.shape is not None:
            return self.shape.held_bytes(num_tokens)
        return num_tokens * self.kv_bytes_per_token

    def spine_bytes(self, num_tokens: int) -> int:
        """Bytes of so many tokens in the layers that keep all of them."""
        if self.shape is not None:
            return num_tokens * self.shape.token_bytes(Reach.FULL)
        return num_tokens * self.kv_bytes_per_token

    @property
    def state_tokens(self) -> int:
        """Tokens of a block with a recurrent state; 0 without such layers."""
        blocks = [group.block_tokens for group in self.geometry.groups if group.reach == "state"]
        return max(blocks, default=0)

    def saving_s(self, num_tokens: int) -> float:
        """Seconds that the engine waits for, until these are saved."""
        if self.asynchronous_saving:
            return 0.0
        return num_tokens * self.kv_bytes_per_token / self.hbm_bandwidth

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a record: a chunk, or a section of one, or a state."""
        return self.kv_bytes_per_token * self.chunk_tokens

    @property
    def nvme_chunk_bytes(self) -> int:
        """Bytes of a record on NVMe."""
        return max(1, round(self.chunk_bytes * self.nvme_record_size))

    def prefill_s(self, start: int, stop: int) -> float:
        """Tokens [start, stop) of a prompt."""
        return (
            (stop - start)
            / self.prefill_tokens_per_s
            * (1 + (start + stop) / 2 / self.prefill_context)
        )

    def decode_s(self, num_sequences: int) -> float:
        """One step without prompts in it."""
        if not num_sequences:
            return 0.0
        return self.decode_step_s + num_sequences * self.decode_sequence_s


def _value(where: str, key: str, value: object) -> Any:
    if key in _SIZES:
        return parse_size(f"{where}: {key}", value)
    if key in ("prefix_cache", "overlap", "asynchronous_saving"):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be true or false")
        return value
    whole = key in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "chunk_tokens",
        "io_depth",
        "states_every",
    )
    good = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not good or not value > 0:  # type: ignore[operator]
        kind = "an integer" if whole else "a number"
        raise ConfigError(f"{where}: {key} is {value!r}; it must be {kind} above 0")
    return value
