# SPDX-License-Identifier: Apache-2.0
"""`attnstore doctor [YAML]`: everything that a start would refuse or warn about. Loads no model."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from attnstore_vllm import _native, preflight
from attnstore_vllm.cli.settings_file import read_settings
from attnstore_vllm.cli.slab_file import opened, stored_files
from attnstore_vllm.cli.speeds import FILE_BYTES, disk_speed, memory_speed
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import AttnStoreError, ConfigError, UnsupportedError
from attnstore_vllm.io.codec import NONE
from attnstore_vllm.io.device import ALIGNMENT_BYTES
from attnstore_vllm.io.disk_node import disk_numa_node
from attnstore_vllm.model_shape import shape_of
from attnstore_vllm.plain_text import quantity
from attnstore_vllm.tiers.nvme.aside import kept, stops
from attnstore_vllm.tiers.nvme.format import SegmentHeader
from attnstore_vllm.tiers.nvme.slab import NO_RESERVE, fallocate
from attnstore_vllm.tiers.shared.start import try_store, without_secret
from attnstore_vllm.transfer import region
from attnstore_vllm.transfer.cuda_kernels import native_module

State = Literal["ok", "warn", "bad", "note"]
"""`bad`: a start would be refused. `note`: a fact that is neither."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    found: str

    def as_json(self) -> dict[str, str]:
        return {"check": self.name, "state": self.state, "found": self.found}


_IN_MEMORY = ("tmpfs", "ramfs")
_NO_VLLM = (
    "not installed in this environment: no server can start from here. Without it these commands "
    "work: init, check, simulate, plan, curve, verify, inspect, gc and top"
)


def examine(file: Path | None, model: Path | None) -> Iterator[Check]:
    """All checks, as they are made. Cost: some seconds, and 512 MiB of memory for a moment.

    Args:
        file: settings; None: the machine alone.
        model: a directory with a config.json; None: sizes in tokens are not told.
    Raises: ConfigError if `file` cannot be read.
    """
    gpus = list(_gpus())
    yield from _versions()
    yield from gpus or [Check("GPU", "note", "nvidia-smi shows none: the CPU build is expected")]
    yield from _native_parts(has_gpu=bool(gpus))
    if file is None:
        yield Check("memory", "note", _memory())
        yield from _left_behind()
        yield Check("settings", "note", "no file was given: neither settings nor disk are checked")
        return
    settings = read_settings(file)
    problems = settings.problems()
    if problems:
        yield from (Check("settings", "bad", str(problem)) for problem in problems)
        yield Check("memory", "note", _memory())
        yield from _left_behind()
        yield Check("disk", "note", "not looked at before the settings are right")
        return
    config = settings.config()
    yield Check("settings", "ok", f"{file}: they fit together")
    yield from (Check("settings", "note", hint) for hint in settings.hints())
    if (num_paths := len(config.nvme.paths)) > config.data_parallel_size:
        # Not in the file, or it would be wrong: the command line of vLLM says it.
        config = replace(config, data_parallel_size=num_paths)
        engines = f"nvme.path names {num_paths} directories: start {num_paths} engines at least"
        yield Check("settings", "note", f"{engines} (vllm serve --data-parallel-size)")
    yield from _machine(config, pins_memory=bool(gpus))
    yield Check("memory", "note", f"{_memory()}; a copy runs at {_rate(memory_speed())}")
    yield from _left_behind()
    for path in config.nvme.paths:
        yield from _disk(path, config)
        yield from _content(path)
    if config.peers:
        engines = "data-parallel engines of this host read each other, should there be several"
        yield Check("peers", "note", engines)
    yield from _audit(config)
    yield from _shared(config)
    if model is not None:
        yield _tokens(model, config)


def _versions() -> Iterator[Check]:
    yield Check("python", "ok", platform.python_version())
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        yield Check("vLLM", "bad", _NO_VLLM)
        return
    tested = version.split("+", maxsplit=1)[0] in preflight.TESTED_VLLM
    known = "" if tested else f"; tested are {', '.join(preflight.TESTED_VLLM)}"
    yield Check("vLLM", "ok" if tested else "warn", f"{version}{known}")


def _gpus() -> Iterator[Check]:
    if shutil.which("nvidia-smi") is None:
        return
    asked = "--query-gpu=name,memory.total,driver_version,compute_cap"
    command = ["nvidia-smi", asked, "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        yield Check("GPU", "warn", f"nvidia-smi fails: {error}")
        return
    for line in said.stdout.splitlines():
        yield Check("GPU", "ok", f"{line} (name, memory, driver, compute capability)")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_open = limit == resource.RLIM_INFINITY
    yield Check("locked memory", "note", "no limit" if is_open else f"limit {format_size(limit)}")


def _native_parts(*, has_gpu: bool) -> Iterator[Check]:
    if _native.has_uring:
        yield Check("io_uring", "ok", "built in")
    else:
        yield Check(
            "io_uring",
            "warn",
            "not built in: install liburing-dev and libxxhash-dev, then install this package again",
        )
    if not has_gpu:
        return
    try:
        native_module()
    except UnsupportedError as error:
        yield Check("CUDA copies", "bad", str(error))
    else:
        yield Check("CUDA copies", "ok", "built in, and the driver answers")


def _memory() -> str:
    shared = preflight.shared_memory(preflight.SHM_DIR)
    return (
        f"{format_size(preflight.memory_available())} available; {preflight.SHM_DIR} has "
        f"{format_size(shared.free_bytes)} free of {format_size(shared.total_bytes)}"
    )


def _left_behind() -> Iterator[Check]:
    """The shared memory of engines that were killed: a start removes it, and nothing here does."""
    dead = region.dead(preflight.SHM_DIR)
    if dead:
        size = format_size(sum(dead.values()))
        what = f"files of ended engines in {preflight.SHM_DIR}: {len(dead)}, {size}"
        yield Check("left behind", "note", f"{what}; the next start removes them")


def _machine(config: StoreConfig, *, pins_memory: bool) -> Iterator[Check]:
    found: list[str] = []
    try:
        for problem in preflight.problems(config, pins_memory=pins_memory):
            found.append(str(problem))
    except OSError as error:  # what is in a directory that we may not enter
        if not found:
            found.append(f"nvme.path cannot be looked at: {error}")
    yield from (Check("machine", "bad", problem) for problem in found)
    dram, nvme = config.dram_bytes, config.nvme.capacity_bytes
    if nvme < dram and config.nvme.codec == NONE:
        yield Check(
            "sizes",
            "warn",
            f"nvme.capacity is {format_size(nvme)}, less than dram ({format_size(dram)}): it "
            "holds less than DRAM does, so it keeps little more; make it several times as large",
        )
    if not found:
        sizes = f"dram {format_size(dram)}, nvme {format_size(nvme)}"
        yield Check("machine", "ok", f"it has what is asked for: {sizes}")


def _audit(config: StoreConfig) -> Iterator[Check]:
    """Whether there is one, and what earlier ones have left."""
    if config.audit is None:
        yield Check("audit", "note", "off: no hit is compared with what the model computes")
    else:
        every, cap = 1 / config.audit.rate, config.audit.tokens_per_s
        yield Check("audit", "ok", f"one hit in {every:.0f}, up to {cap:,.0f} tokens a second")
    for path in config.nvme.paths:
        try:
            folders = [file.parent for file in stored_files(path)[0]]
            marks = [mark for folder in folders for mark in stops(folder)]
            files = [file for folder in folders for file, _ in kept(folder)]
        except ConfigError:
            continue  # it holds nothing
        except OSError as error:
            yield Check("audit", "warn", f"{path}: what an audit has left cannot be read: {error}")
            continue
        for mark in marks:
            again = f"rm {shlex.quote(str(mark))}"
            yield Check(
                "audit", "warn", f"{mark}: its namespace is not served; again with `{again}`"
            )
        if files:
            found = f"{quantity(len(files), 'chunk')} that differed in {files[0].parent}"
            yield Check("audit", "warn", f"{found}; `attnstore inspect {path}` lists them")


def _shared(config: StoreConfig) -> Iterator[Check]:
    if config.shared is None:
        return
    where = config.shared.where
    try:
        seconds = try_store(config.shared)
    except ConfigError as error:
        yield Check("shared tier", "bad", str(error))
    except AttnStoreError as error:
        yield Check("shared tier", "warn", f"{where}: {error}; a server would go on without it")
    else:
        yield Check("shared tier", "ok", f"{where} answers in {1000 * seconds:.1f} ms")
    if config.shared.secret_file is None:
        yield Check("shared secret", "warn", f"there is none: {without_secret(config.shared)}")


def _disk(path: Path, config: StoreConfig) -> Iterator[Check]:
    """Args: path: one of nvme.path."""
    directory = path if path.is_dir() else path.parent
    if not directory.is_dir():
        return
    free = shutil.disk_usage(directory).free
    kind, node = _file_system(directory), disk_numa_node(directory)
    place = "" if node is None else f", on NUMA node {node}"
    yield Check("disk", "note", f"{directory} is {kind}, {format_size(free)} free{place}")
    if kind in _IN_MEMORY:
        why = "it takes memory beside dram, and a restart of the machine empties it"
        yield Check("disk kind", "warn", f"{directory} is {kind}, which is no disk: {why}")
    try:
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
    except OSError as error:
        yield Check("disk", "bad", f"{directory}: no file can be made there: {error}")
        return
    with file:
        try:
            if not fallocate(file.fileno(), 0, 0, ALIGNMENT_BYTES):
                yield Check("disk", "warn", f"{directory}: {NO_RESERVE}")
        except OSError as error:
            yield Check("disk", "warn", f"{directory}: a file there gets no space: {error}")
    if free < 2 * FILE_BYTES:
        why = f"{directory}: not measured, too little is free for a trial file"
        yield Check("disk speed", "note", why)
        return
    with _warnings() as said:
        try:
            speed = disk_speed(directory, config.nvme, config.io_depth)
        except (AttnStoreError, OSError) as error:
            yield Check("disk speed", "bad", f"{directory}: {error}")
            return
    yield from (Check("disk I/O", "warn", text) for text in said)
    yield Check(
        "disk speed",
        "ok",
        f"{directory}: reads {_rate(speed.read)}, writes {_rate(speed.write)} (records of 1 MiB, "
        f"{config.io_depth} at a time, {speed.by})",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{format_size(int(bytes_per_s))}/s"


def _file_system(directory: Path) -> str:
    """Its type, by the longest mount point that leads to `directory`."""
    best, kind = "", "an unknown file system"
    where = str(directory.resolve())
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, name = line.split(" ")[:3]
        inside = where == mount or where.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of our log meanwhile, in place of the log."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, handler = logging.getLogger("attnstore_vllm"), Kept(logging.WARNING)
    before, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.propagate = before


def _content(directory: Path) -> Iterator[Check]:
    try:
        files, nodes = stored_files(directory)
    except ConfigError:
        yield Check("content", "note", f"{directory} holds no stored KV")
        return
    except OSError as error:
        yield Check("content", "warn", f"{directory} cannot be read: {error}")
        return
    for path in nodes:
        yield Check("content", "note", f"{path}: of a node that is not the first")
    for path in files:
        try:
            with opened(path) as slab:
                found = [segment for _, segment in slab.segments()]
        except (AttnStoreError, OSError) as error:
            yield Check("content", "warn", str(error))
            continue
        labels = sorted({s.label for s in found if isinstance(s, SegmentHeader)})
        damaged = sum(not isinstance(segment, SegmentHeader) for segment in found)
        text = f"{path}: {len(found)} segments of {'; '.join(labels) or 'no owner'}"
        yield Check("content", "note", text)
        if damaged:
            yield Check("content", "warn", f"{path}: {damaged} damaged segments are taken for free")


def _tokens(model: Path, config: StoreConfig) -> Check:
    file = model / "config.json"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            raise ConfigError(f"{file} holds {type(read).__name__}; expected an object")
        shape = shape_of(read, str(file), chunk_tokens=config.chunk_tokens)
    except (OSError, ValueError, AttnStoreError) as error:
        return Check("model", "warn", f"its KV cannot be told from its config.json: {error}")
    geometry = shape.geometry
    is_bfloat16 = "bfloat16" in (read.get("dtype"), read.get("torch_dtype"))
    if config.dram_codec != NONE and is_bfloat16 and shape.packed is None:  # those are of bytes
        geometry = replace(geometry, is_encoded=True)
    slot, chunk = geometry.slot_bytes, geometry.chunk_tokens
    dram, nvme = (size // slot * chunk for size in (config.dram_bytes, config.nvme.capacity_bytes))
    if dram < chunk:
        return Check("model", "bad", f"dram has no room for one chunk of {format_size(slot)}")
    return Check(
        "model",
        "ok",
        f"{chunk} tokens take {format_size(slot)}: dram holds {dram:,} tokens, nvme {nvme:,}",
    )


def show(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        text = check.found.replace("\n", "\n" + " " * (width + 8))
        print(f"{check.state:<5} {check.name:<{width}}  {text}")
    bad, warn = (sum(check.state == state for check in checks) for state in ("bad", "warn"))
    if bad:
        print(f"\nA start would be refused: {bad} bad, {warn} to look at.")
    else:
        print(f"\nA start would not be refused; {warn} to look at.")


def as_json(checks: list[Check]) -> dict[str, Any]:
    return {"refused": is_bad(checks), "checks": [check.as_json() for check in checks]}


def is_bad(checks: list[Check]) -> bool:
    return any(check.state == "bad" for check in checks)
