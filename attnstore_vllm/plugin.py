# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin entry point: makes the connector known, and lets users write a YAML path.

vLLM wants JSON after --kv-transfer-config. It loads general plugins before it parses its
arguments, so register() replaces the path in sys.argv by the JSON made of the file. It does so
in the process that the user started only, and there the settings are checked against the
machine, before any model is loaded. It may run several times, in every process.

Where there is no command line (LLM(...)), or the setting is in a file of vLLM's own (--config),
check_early() does that, as far as vLLM asks the connector anything before it loads the model.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from attnstore_vllm.config.deadlines import old_names
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.values import LEAST, load_yaml
from attnstore_vllm.engine_start import end_start, note_start, tell_children
from attnstore_vllm.errors import AttnStoreError, ConfigError, MachineError
from attnstore_vllm.preflight import SHM_DIR, check_machine
from attnstore_vllm.transfer.region import sweep_at_exit

logger = logging.getLogger(__name__)

CONNECTOR = "AttnStoreConnector"
MODULE = "attnstore_vllm.connector"
_FLAG = "--kv-transfer-config"
_YAML = (".yaml", ".yml")
_NODES = ("--nnodes", "-n")


def register() -> None:
    """The entry point. Ends the process with one message if the settings are wrong."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    log_as_vllm()
    note_start(holds=False)
    _ask_for_amx()
    if multiprocessing.parent_process() is None:
        try:
            sys.argv[:] = expand(sys.argv, pins_memory=_is_cuda())
        except AttnStoreError as error:
            raise SystemExit(f"AttnStore cannot start: {error}{advice(error, sys.argv)}") from None


def advice(error: AttnStoreError, argv: list[str]) -> str:
    """A line that names the command which says more than `error`; empty where none does."""
    files = [value for _, _, value in _values(argv, _FLAG) if value.endswith(_YAML)]
    file = shlex.quote(files[0]) if files else "FILE"
    if isinstance(error, MachineError):
        return f"\n(`attnstore doctor {file}` says all that a start on this machine would refuse.)"
    if isinstance(error, ConfigError) and not isinstance(error.__cause__, OSError):
        return f"\n(`attnstore check {file}` says all that is wrong with the settings.)"
    return ""


def _ask_for_amx() -> None:
    """Ask the kernel for AMX's tiles, which vLLM 0.32's attention on the CPU uses without asking.

    oneDNN asks too, but only when it first compiles a product: a server whose compile cache is
    warm has not come to that and dies of an illegal instruction at its first request.
    """
    import torch  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


_checked: set[StoreConfig] = set()
"""Settings that this process has found to fit: with the pool allocated they might not fit again."""


def check_early(extra: object) -> None:
    """Check our settings against the machine, once, in the process that the user started.

    Args:
        extra: kv_connector_extra_config.
    Raises: ConfigError.
    """
    is_new = note_start(holds=True)
    if multiprocessing.parent_process() is not None:
        return
    tell_children()
    try:
        config = StoreConfig.parse(extra)
        _warn_of_old_names(extra, config)
        if config not in _checked:
            _check(config, None, pins_memory=_is_cuda())
    except AttnStoreError:
        if is_new:  # no model is loaded: the next engine of this process begins later
            end_start()
        raise


def _warn_of_old_names(extra: object, config: StoreConfig) -> None:
    """Once for the same settings: vLLM has them read several times."""
    if config not in _checked:
        for _, hint in old_names(extra):
            logger.warning("the settings have an old name, which is still read: %s", hint)


def _check(config: StoreConfig, ranks: Sequence[int] | None, *, pins_memory: bool) -> None:
    check_machine(config, ranks, pins_memory=pins_memory)
    if not _checked:
        sweep_at_exit(SHM_DIR)  # vLLM kills engines that were starting when it was told to end
    _checked.add(config)


def _is_cuda() -> bool:
    from vllm.platforms import current_platform  # noqa: PLC0415

    return bool(current_platform.is_cuda())


def log_as_vllm() -> None:
    """Send our log where vLLM's goes: it sets up the logger `vllm` and no other."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("attnstore_vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.level)
        ours.propagate = False


def expand(argv: list[str], *, pins_memory: bool = False) -> list[str]:
    """The command line with a YAML path replaced by its JSON, and our settings checked.

    Args:
        pins_memory: whether the pool will be page-locked for CUDA.
    Raises: ConfigError. Arguments that are not about us are left alone.
    """
    expanded = list(argv)
    for at, prefix, value in _values(argv, _FLAG):
        transfer = _read(value)
        if transfer is None:
            continue
        ours = list(ours_in(transfer))
        for connector in ours:
            config = _complete(connector, _engines(argv))
            if (_number(argv, *_NODES) or 1) > _engines(argv):
                over_nodes(config)
            _warn_of_old_names(connector["kv_connector_extra_config"], config)
            _check(config, _ranks_here(argv, config.data_parallel_size), pins_memory=pins_memory)
        if ours:
            transfer.setdefault("kv_load_failure_policy", "recompute")
            expanded[at] = prefix + json.dumps(transfer)
    return expanded


def _values(argv: list[str], *flags: str) -> Iterator[tuple[int, str, str]]:
    """(index in argv, what stands before the value there, value) of each use of the flags."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") not in flags:
            continue
        if equals:
            yield i, f"{name}=", value
        elif i + 1 < len(argv):
            yield i + 1, "", argv[i + 1]


def _read(value: str) -> dict[str, Any] | None:
    """The KVTransferConfig that the value means, or None if it is not for us to read."""
    if value.endswith(_YAML):
        try:
            found = load_yaml(Path(value).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{_FLAG} is {value!r}, which cannot be read: {why_unreadable(value, error)}"
            ) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{_FLAG} is {value!r}, which is no YAML: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(
                f"{_FLAG} is {value!r}, which holds {found!r}; it must hold settings, as in\n"
                f"{LEAST}"
            )
        if "kv_connector" in found:
            return found
        return {"kv_connector": CONNECTOR, "kv_connector_extra_config": found}
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        return None  # vLLM will say what is wrong with it
    return found if isinstance(found, dict) else None


def why_unreadable(file: str, error: OSError | UnicodeDecodeError) -> str:
    """The end of the message about a file of settings."""
    if isinstance(error, FileNotFoundError):
        return f"there is no such file; `attnstore init > {shlex.quote(file)}` makes one"
    return str(error)


def ours_in(transfer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each configuration of our connector in it, the children of MultiConnector included."""
    if transfer.get("kv_connector") == CONNECTOR:
        yield transfer
    elif transfer.get("kv_connector") == "MultiConnector":
        extra = transfer.get("kv_connector_extra_config")
        children = extra.get("connectors") if isinstance(extra, dict) else None
        for child in children if isinstance(children, list) else []:
            if isinstance(child, dict):
                yield from ours_in(child)


def _complete(connector: dict[str, Any], engines: int) -> StoreConfig:
    """Read the settings, and fill in what vLLM wants to be told."""
    extra = connector.setdefault("kv_connector_extra_config", {})
    if engines > 1 and isinstance(extra, dict):
        extra.setdefault("data_parallel_size", engines)
    config = StoreConfig.parse(extra)
    connector.setdefault("kv_role", "kv_both")
    return config


def over_nodes(config: StoreConfig) -> None:
    """Raise ConfigError for settings that an engine over several machines does not know, if they
    are given: what is on by default is off there.

    Each has its own DRAM and NVMe, and what these settings do has the bytes of one machine alone.
    """
    found = {
        "nvme.codec": config.nvme.codec != "none",
        "shared": config.shared is not None,
        "audit": config.audit is not None and not config.audit.by_default,
    }
    unknown = [name for name, is_set in found.items() if is_set]
    if unknown:
        raise ConfigError(
            f"--nnodes spreads one engine over several machines, where {', '.join(unknown)} cannot "
            "be used: it would have the KV of one machine's ranks. Leave it out, or give each "
            "data-parallel engine a machine of its own (--data-parallel-size)"
        )


def _engines(argv: list[str]) -> int:
    """How many data-parallel engines the command line asks for. Each is told its rank only."""
    return _number(argv, "--data-parallel-size", "-dp") or 1


def _ranks_here(argv: list[str], engines: int) -> Sequence[int]:
    """Which of them this command starts on this machine; all, unless it says otherwise."""
    rank = _number(argv, "--data-parallel-rank", "-dpn")
    if rank is not None:
        return range(engines)[rank : rank + 1]
    nodes = _number(argv, *_NODES) or 1
    local = _number(argv, "--data-parallel-size-local", "-dpl")
    if nodes > 1 and local is None:  # vLLM shares them out, and knows the first by the node
        local = max(1, engines // nodes)
    node = _number(argv, "--node-rank", "-r") or 0
    first = _number(argv, "--data-parallel-start-rank", "-dpr") or (local or 0) * node
    return range(engines)[first : None if local is None else first + local]


def _number(argv: list[str], *flags: str) -> int | None:
    for _, _, value in _values(argv, *flags):
        if value.isdecimal():
            return int(value)
    return None
