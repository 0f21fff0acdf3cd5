# SPDX-License-Identifier: Apache-2.0
"""The faults: each a small story of engines that follow each other on one directory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import utime
from pathlib import Path
from typing import Any, Final

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.errors import AttnStoreError
from benchmarks.others_parts import damage, engines
from benchmarks.others_parts.engines import Lora
from benchmarks.others_parts.judge import Cell, Outcome, check_power, judge
from benchmarks.others_parts.systems import Piece, System
from benchmarks.rounding import bound
from benchmarks.server import ServerError
from tests.vllm.adapters import make_adapter
from tests.vllm.engine import Answer, EngineSpec
from tests.vllm.host import EngineHost, HostError
from tests.vllm.prompts import random_tokens
from tests.vllm.test_namespace_starts import LONG

PROMPT_TOKENS, STORED_TOKENS = 520, 512
"""Of each prompt; and the whole chunks of it, of 128 or 256 tokens."""
PROMPTS: Final = tuple(tuple(random_tokens(name, PROMPT_TOKENS)) for name in ("one", "other"))
SOUND_TOKENS: Final = 256
CAT, DOG = 0.05, 0.11
CALL_DEADLINE_S: Final = 120.0
LORA: Final = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}
OTHER_ROTARY: Final = {
    "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
}
ERROR: Final = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)

LONGEST: Final = 200
"""Characters of an error's line."""

Vllm = Mapping[str, Any]
Ask = tuple[Any, ...]
"""A function of the engine that answers, and its arguments."""
PLAIN: Final[Ask] = (engines.ask, PROMPTS)
Reference = tuple[list[Answer], float]
"""Answers, and what is rounding among them, in nats."""


BY_COUNTER: Final = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
"""With these, vLLM names sounds `renderer0-mm-N-audio-0`; each process counts from the start."""


class DoesNotRunError(AttnStoreError):
    """A system fails, or serves nothing, with no fault at all."""


class RefusedError(AttnStoreError):
    """An engine does not start behind a fault."""


class EndedError(AttnStoreError):
    """An engine answers a request behind a fault with an error, and runs no more."""


@dataclass
class Lab:
    """Where models, stores and references are, for one run."""

    work: Path
    references: dict[str, Reference] = field(default_factory=dict)
    primed: set[str] = field(default_factory=set)
    serving: set[str] = field(default_factory=set)
    """Systems that were seen to serve."""
    starts: int = 0

    def __post_init__(self) -> None:
        self.model = make_model(self.work / "model", TINY)

    @property
    def lora(self) -> Path:
        return self.work / "adapter"

    @contextmanager
    def engine(self, system: System | None, vllm: Vllm, directory: Path) -> Iterator[EngineHost]:
        """Raises: HostError, ServerError if it does not start."""
        self.starts += 1
        log = self.work / "logs" / f"{self.starts}-{system.name if system else 'reference'}"
        log.parent.mkdir(exist_ok=True)
        more = {"model": str(self.model), **vllm}

        def spec(transfer: Mapping[str, Any] | None) -> EngineSpec:
            models = self.work / "models"
            numba = system is not None and system.package == "lmcache"
            return EngineSpec(
                store=None, transfer=transfer, models=models, vllm=more, needs_numba=numba
            )

        if system is None:
            with EngineHost(spec(None), log, call_deadline_s=CALL_DEADLINE_S) as host:
                yield host
            return
        with (
            system.running(directory, log.with_suffix(".daemon")) as transfer,
            EngineHost(spec(transfer), log, call_deadline_s=CALL_DEADLINE_S) as host,
        ):
            yield host

    def reference(self, name: str, vllm: Vllm, lora: Lora = None) -> Reference:
        """What a fresh engine without a connector computes."""
        if name not in self.references:
            with self.engine(None, vllm, self.work) as host:
                answers, drifts = host.call(engines.compute, PROMPTS, lora)
            self.references[name] = answers, bound(drifts)
        return self.references[name]

    def store(self, system: System) -> Path:
        """Of the system's: always the same path, since it may be part of what is stored."""
        return self.work / "stores" / system.name

    def empty(self, system: System) -> Path:
        directory = self.store(system)
        shutil.rmtree(directory, ignore_errors=True)
        return directory

    def prime(self, system: System, name: str, vllm: Vllm, ask: Ask) -> Path:
        """A directory as an engine leaves it that was asked so; the same for each fault of a
        run."""
        directory = self.empty(system)
        copy = self.work / "primed" / f"{system.name}-{name}"
        if copy.name not in self.primed:
            with _failing_as(DoesNotRunError), self.engine(system, vllm, directory) as host:
                host.call(*ask)
                host.call(engines.settle, directory)
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(directory, copy)
            self.primed.add(copy.name)
            shutil.rmtree(directory)
        shutil.copytree(copy, directory)
        return directory

    def ask(self, system: System, vllm: Vllm, ask: Ask = PLAIN) -> list[Answer]:
        """Of an engine that starts on what is in the system's directory.

        Raises: RefusedError, EndedError.
        """
        with ExitStack() as undo:
            with _failing_as(RefusedError):
                host = undo.enter_context(self.engine(system, vllm, self.store(system)))
            with _failing_as(EndedError):
                answers: list[Answer] = host.call(*ask)
                return answers

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Others in the model's file, of the same size and the same time."""
        file = self.model / "model.safetensors"
        before, plain = file.stat(), file.read_bytes()
        other = make_model(self.work / "other-model", TINY, seed=1) / file.name
        assert other.stat().st_size == before.st_size
        try:
            file.write_bytes(other.read_bytes())
            utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            yield
        finally:
            file.write_bytes(plain)
            utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextmanager
def _failing_as(kind: type[AttnStoreError]) -> Iterator[None]:
    try:
        yield
    except (HostError, ServerError) as error:
        raise kind(cause(error)) from error


def cause(error: Exception) -> str:
    """In a line. A traceback comes before the log's end in it."""
    text = str(error)
    return last_error(text.partition("--- the end of")[0]) or last_error(text) or text[:LONGEST]


def last_error(text: str) -> str:
    """The last error's line: those before are what it was made of."""
    found = ERROR.findall(text)
    return found[-1][:LONGEST].strip() if found else ""


# ---- the stories ---------------------------------------------------------------------------


def _judge(answers: Sequence[Answer], reference: Reference, of: int) -> Cell:
    right, limit = reference
    served = sum(answer.cached_tokens for answer in answers)
    return judge(list(zip(answers, right, strict=True)), served, of, limit)


def same_process(lab: Lab, system: System) -> Cell:
    base = lab.reference("base", {})
    with _failing_as(DoesNotRunError), lab.engine(system, {}, lab.empty(system)) as host:
        first = host.call(engines.ask, PROMPTS)
        host.call(engines.settle, lab.store(system))
        again = host.call(engines.ask, PROMPTS)
    computed = _judge(first, base, 0)
    found = computed if computed.outcome is Outcome.WRONG else _judge(again, base, _of())
    if found.outcome is Outcome.COMPUTED:
        raise DoesNotRunError(f"it serves nothing: {last_error(host.log_text())}")
    return found


def _of() -> int:
    return len(PROMPTS) * STORED_TOKENS


def restart(lab: Lab, system: System) -> Cell:
    lab.prime(system, "plain", {}, PLAIN)
    return _judge(lab.ask(system, {}), lab.reference("base", {}), _of())


def _other_engine(name: str, vllm: Vllm, *, other_answers: bool) -> Story:
    def story(lab: Lab, system: System) -> Cell:
        reference = lab.reference(name, vllm)
        if other_answers:
            check_power(lab.reference("base", {})[0], *reference)
        lab.prime(system, "plain", {}, PLAIN)
        cell = _judge(lab.ask(system, vllm), reference, _of())
        return if_right_without(lab, system, cell, (name, vllm, PLAIN), reference)

    return story


def if_right_without(
    lab: Lab, system: System, cell: Cell, setting: tuple[str, Vllm, Ask], reference: Reference
) -> Cell:
    """The cell, where the same engine is right over what it stored itself: a system that is wrong
    with these settings alone has no fault to show. Raises: DoesNotRunError."""
    if cell.outcome is not Outcome.WRONG or not system.keeps:
        return cell
    name, vllm, ask = setting
    lab.prime(system, name, vllm, ask)
    control = _judge(lab.ask(system, vllm, ask), reference, cell.of)
    if control.outcome is not Outcome.RIGHT:
        raise DoesNotRunError(f"with these settings and no fault: {control.outcome}")
    return cell


def weights(lab: Lab, system: System) -> Cell:
    base = lab.reference("base", {})
    lab.prime(system, "plain", {}, PLAIN)
    with lab.other_weights():
        reference = lab.reference("weights", {})
        check_power(base[0], *reference)
        return _judge(lab.ask(system, {}), reference, _of())


def _adapters(lab: Lab) -> tuple[Reference, tuple[int, str]]:
    """What the new adapter answers; and the old one, which is in place."""
    lora = (1, str(make_adapter(lab.lora, TINY, seed=62)))
    reference = lab.reference("new adapter", LORA, lora)
    make_adapter(lab.lora, TINY, seed=61)
    check_power(lab.reference("old adapter", LORA, lora)[0], *reference)
    return reference, lora


def lora(lab: Lab, system: System) -> Cell:
    reference, old = _adapters(lab)
    new = (2, old[1])  # what a server numbers an adapter that is loaded again
    with _failing_as(DoesNotRunError), lab.engine(system, LORA, lab.empty(system)) as host:
        host.call(engines.ask, PROMPTS, old)
        host.call(engines.settle, lab.store(system))
        make_adapter(lab.lora, TINY, seed=62)
        host.call(engines.add_lora, new)
        answers = host.call(engines.ask, PROMPTS, new)
    cell = _judge(answers, reference, _of())
    ask = (engines.ask, PROMPTS, old)
    return if_right_without(lab, system, cell, ("new adapter", LORA, ask), reference)


def lora_restart(lab: Lab, system: System) -> Cell:
    reference, old = _adapters(lab)
    ask = (engines.ask, PROMPTS, old)
    lab.prime(system, "lora", LORA, ask)
    make_adapter(lab.lora, TINY, seed=62)
    cell = _judge(lab.ask(system, LORA, ask), reference, _of())
    return if_right_without(lab, system, cell, ("new adapter", LORA, ask), reference)


def media(lab: Lab, system: System) -> Cell:
    """vLLM's CPU build comes without torchvision, so sounds stand for pictures: one path."""
    model = lab.work / "hears"
    if not model.exists():
        engines.make_listener(model)
    vllm = {"model": str(model), "max_model_len": LONG, **BY_COUNTER}
    if "media" not in lab.references:
        with lab.engine(None, vllm, lab.work) as host:
            answers, drifts = host.call(engines.hear, [CAT, DOG])
        lab.references["media"] = answers, bound(drifts)
    (cat, dog), limit = lab.references["media"]
    check_power([cat], [dog], limit)
    lab.prime(system, "media", vllm, (engines.listen, [CAT]))
    ask = (engines.listen, [DOG])
    cell = _judge(lab.ask(system, vllm, ask), ([dog], limit), SOUND_TOKENS)
    return if_right_without(lab, system, cell, ("same media", vllm, ask), ([dog], limit))


def _damaged(how: Callable[[Sequence[Piece]], None]) -> Story:
    def story(lab: Lab, system: System) -> Cell:
        directory = lab.prime(system, "plain", {}, PLAIN)
        assert system.pieces is not None
        how(system.pieces(directory))
        return _judge(lab.ask(system, {}), lab.reference("base", {}), _of())

    return story


Story = Callable[[Lab, System], Cell]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table.

    Args:
        needs_files: a system that keeps nothing after its process cannot have it.
    """

    name: str
    words: str
    story: Story
    needs_files: bool = True


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault("same-process", "none: asked again", same_process, needs_files=False),
        Fault("restart", "none: asked again after a restart", restart),
        Fault("kv-dtype", "fp8 KV where bf16 was stored",
              _other_engine("kv-dtype", {"kv_cache_dtype": "fp8"}, other_answers=False)),
        Fault("block-size", "blocks of 64 tokens where 128 were stored",
              _other_engine("block-size", {"block_size": 64}, other_answers=False)),
        Fault("rotary", "another rotary base, by `--hf-overrides`",
              _other_engine("rotary", OTHER_ROTARY, other_answers=True)),
        Fault("weights", "other weights, file of the same size and time", weights),
        Fault("lora", "LoRA adapter replaced, same name and path", lora, needs_files=False),
        Fault("lora-restart", "the same, over a restart", lora_restart),
        Fault("media", "another sound that vLLM's counter names alike, over a restart", media),
        Fault("bit", "one stored bit flipped", _damaged(damage.flip_bit)),
        Fault("swap", "two stored blocks swapped", _damaged(damage.swap)),
        Fault("short", "a stored file cut short", _damaged(damage.cut)),
    )
}  # fmt: skip


def try_fault(lab: Lab, system: System, fault: Fault) -> Cell:
    """Raises: NoPowerError if the fault itself says nothing."""
    if (why := system.why_not()) is not None:
        return Cell(Outcome.ABSENT, why=why)
    if fault.needs_files and not system.keeps:
        return Cell(Outcome.NOT_REACHED, why="it keeps nothing after its process")
    try:
        if system.name not in lab.serving:  # what serves nothing at all would pass every fault
            first = same_process(lab, system)
            lab.serving.add(system.name)
            if fault.story is same_process:
                return first
        return fault.story(lab, system)
    except DoesNotRunError as error:
        return Cell(Outcome.ABSENT, why=str(error))
    except RefusedError as error:
        return Cell(Outcome.REFUSED, why=str(error))
    except EndedError as error:
        return Cell(Outcome.ENDED, why=str(error))
    except damage.NothingStoredError as error:
        return Cell(Outcome.NOT_REACHED, why=str(error))
