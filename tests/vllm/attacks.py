# SPDX-License-Identifier: Apache-2.0
"""Attacks that once got wrong KV served. Each runs in an engine's process, with its mend taken out.

An attack leaves KV; then a victim asks. The audit is off at first, so that it is served.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.policy.learned_bound import PAIRS
from attnstore_vllm.tiers.shared.record import HEADER_BYTES, RecordNames
from attnstore_vllm.types import Event
from tests.shared.stranger import Stranger
from tests.vllm import engine as engines
from tests.vllm import mends
from tests.vllm.adapters import make_adapter
from tests.vllm.engine import CHUNK, Answer, Engine, poison
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import chunks, events
from tests.vllm.test_lora import adapter
from tests.vllm.test_namespace_starts import AUDIO
from tests.vllm.test_shared_served import join, tier_of
from tests.vllm.test_truncation import two_ways
from tests.vllm.test_weight_updates import train

LENGTH = 2 * CHUNK + 200
"""Behind its whole chunks is one more whole block of vLLM's: less is not compared."""
SAYS = 16
SOUND_RATE = 16_000
OUTCOMES = (Event.AGREED.value, Event.DIFFERED.value, Event.NOT_COMPARED.value)

Victim = Callable[[str | None], Answer]
"""Asks, as a tenant of this salt; vLLM's own caches have nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a victim got."""

    served: Answer
    """With the audit off."""
    computed: Answer
    """The right answer: that of a tenant who has nothing stored."""
    audited: Answer
    """With the audit on."""
    outcomes: Counter[str]
    """The audit's."""


@contextmanager
def audit_off(engine: Engine) -> Iterator[None]:
    with mock.patch.object(engine.side.audits, "draw", None):
        yield


def judge(engine: Engine, victim: Victim) -> Seen:
    """The victim asks with the audit off, and with it on."""

    def ask(salt: str | None = None) -> Answer:
        engine.settle()
        answer = victim(salt)
        engine.settle()
        return answer

    with audit_off(engine):
        served, computed = ask(), ask("a tenant who has nothing stored")
    before = Counter(events(engine, *OUTCOMES))
    audited = ask()
    return Seen(served, computed, audited, Counter(events(engine, *OUTCOMES)) - before)


def asks(engine: Engine, seed: str, **how: Any) -> Victim:
    prompt = random_tokens(seed, LENGTH)

    def ask(salt: str | None = None) -> Answer:
        engine.forget_hbm()
        return engine.ask(prompt, max_tokens=SAYS, salt=salt, **how)

    return ask


def leave(engine: Engine, seed: str) -> None:
    """KV of a prompt, on every tier."""
    with audit_off(engine):
        asks(engine, seed)(None)
        engine.settle()


def find(engine: Engine, seed: str) -> Seen:
    return judge(engine, asks(engine, seed))


def run_a_while(engine: Engine) -> None:
    """Other prompts come again in other crowds, and are audited: then the bound is learned."""
    prompts = [random_tokens(("while", number), LENGTH) for number in range(PAIRS)]
    for size in (1, 4):
        engine.forget_hbm()
        for first in range(0, len(prompts), size):
            engine.finish(*[engine.submit(one) for one in prompts[first : first + size]])
            engine.settle()


# ---- adapters -------------------------------------------------------------------------------


def replaced_behind(engine: Engine, directory: Path) -> Seen:
    """Its files are replaced after it was loaded, and before the first request."""
    path = make_adapter(directory / "behind", TINY, seed=31)
    with mends.adapters_by_their_files(), audit_off(engine):
        engine.llm.llm_engine.add_lora(adapter(31, path))
        make_adapter(path, TINY, seed=32)
        asks(engine, "behind", lora=adapter(31, path))(None)
        engine.llm.llm_engine.add_lora(adapter(32, path))
        engine.ask(random_tokens("told", 100), lora=adapter(32, path))  # else the load fails
    with mends.adapters_by_their_files():
        return judge(engine, asks(engine, "behind", lora=adapter(32, path)))


def thrown_out(engine: Engine, directory: Path) -> Seen:
    """Thrown out of vLLM's cache by four others; its files are others when it comes back."""
    path = make_adapter(directory / "thrown out", TINY, seed=41)
    others = [make_adapter(directory / f"other {i}", TINY, seed=50 + i) for i in range(4)]
    ask = asks(engine, "thrown out", lora=adapter(41, path))
    with mends.adapters_known_for_good():
        with audit_off(engine):
            ask(None)
            make_adapter(path, TINY, seed=42)
            for i, other in enumerate(others):
                engine.ask(random_tokens(i, 100), lora=adapter(51 + i, other))
            ask(None)  # a load that fails: the workers still compare
        return judge(engine, ask)


def name_of_two(engine: Engine, directory: Path) -> Seen:
    """vLLM's own cache has KV of the old adapter under the new one's name."""
    path = make_adapter(directory / "name of two", TINY, seed=61)
    ask = asks(engine, "name of two", lora=adapter(61, path))
    with mends.names_of_one(), audit_off(engine):
        ask(None)
        make_adapter(path, TINY, seed=62)
        engine.llm.llm_engine.add_lora(adapter(62, path))
        engine.ask(random_tokens("name of two", LENGTH), lora=adapter(62, path))
    with mends.names_of_one():
        return judge(engine, asks(engine, "name of two", lora=adapter(62, path)))


# ---- weights --------------------------------------------------------------------------------


def updated(engine: Engine, _: Path) -> Seen:
    """Weights come from a trainer. A plain reset of vLLM's prefix cache follows."""
    with mends.no_look():
        leave(engine, "updated")
        engine.llm.collective_rpc(train, args=(1,))
        return find(engine, "updated")


def asleep_at_once(engine: Engine, _: Path) -> Seen:
    """Asleep right behind an answer, whose end is not copied yet."""
    prompt = random_tokens("asleep", LENGTH)
    with audit_off(engine):
        engine.finish(engine.submit(prompt, max_tokens=SAYS))
        with mends.sleeps_keep_all():
            engine.llm.sleep(1)
        engine.llm.collective_rpc(poison)
        engine.llm.wake_up()
    return find(engine, "asleep")


def train_and_leave(engine: Engine, seed: str) -> None:
    engine.llm.collective_rpc(train, args=(1,))
    leave(engine, seed)


SHORT = 1024
"""A --max-model-len with the short factors; above it are the long ones."""


def long_rope(directory: Path) -> Path:
    """A model that turns by other angles where --max-model-len is above SHORT."""
    model = make_model(directory, TINY)
    config = json.loads((model / "config.json").read_text())
    half = TINY.head_dim // 2
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": config.pop("rope_theta"),
        "short_factor": [1.0] * half, "long_factor": [4.0] * half,
        "original_max_position_embeddings": SHORT,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    return model


BIT = 0x2000
"""Of a bfloat16: of 1 it leaves next to nothing."""


def flip(worker: Any, column: int) -> None:
    """One bit of what the last layer's input is multiplied by."""
    norm = worker.model_runner.model.model.layers[-1].input_layernorm
    norm.weight.data.view(torch.int16)[column] ^= BIT


def leave_and_look_for_a_bit(engine: Engine, seed: str) -> int:
    """Leave KV of a prompt. Returns where one bit of the weights changes its answer."""
    leave(engine, seed)
    ask = asks(engine, seed)
    with audit_off(engine), mends.no_look():
        right = ask("before")
        for column in range(TINY.hidden):
            engine.llm.collective_rpc(flip, args=(column,))
            answer = ask(f"column {column}")
            engine.llm.collective_rpc(flip, args=(column,))
            if answer.tokens != right.tokens:
                return column
    raise AssertionError("none changes the answer")


def flip_in_file(model: Path, column: int) -> None:
    """As flip(). The file keeps its size and time."""
    file = model / "model.safetensors"
    before, tensors = file.stat(), load_file(file)
    name = f"model.layers.{TINY.layers - 1}.input_layernorm.weight"
    tensors[name].view(torch.int16)[column] ^= BIT
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


# ---- media ----------------------------------------------------------------------------------


def forget_media(engine: Engine) -> None:
    """Empty vLLM's caches of what its processor and its encoder have made."""
    engine.core.reset_mm_cache()
    engine.llm.llm_engine.reset_mm_cache()
    engine.core.reset_encoder_cache()


def hears_well(mend: Callable[[], None]) -> None:
    """Before a start: a mend is out. Random weights are so large that answers depend on sounds."""
    engines.DUMMY = 1.0
    mend()


def sound_of(name: str) -> Any:
    """Eight seconds."""
    times = np.arange(SOUND_RATE * 8)
    made = {
        "noise": np.random.default_rng(1).normal(size=len(times), scale=0.3),
        "silence": np.zeros(len(times)),
        "tone": np.sin(times * 0.05),
        "other tone": np.sin(times * 0.11),
    }
    return made[name].astype(np.float32)


def listens(engine: Engine, sound: str, uuid: str | None = None) -> Victim:
    """A question about a sound."""
    tokenizer = engine.llm.get_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids([AUDIO[1], AUDIO[0], AUDIO[2]])
    prompt: dict[str, Any] = {
        "prompt_token_ids": [*tokens, *random_tokens(3, 30)],
        "multi_modal_data": {"audio": [(sound_of(sound), SOUND_RATE)]},
    }
    if uuid is not None:
        prompt["multi_modal_uuids"] = {"audio": [uuid]}

    def ask(salt: str | None = None) -> Answer:
        engine.forget_hbm()
        forget_media(engine)
        return engine.ask(prompt, max_tokens=SAYS, salt=salt)

    return ask


def hear(engine: Engine, sound: str, times: int = 1) -> None:
    with audit_off(engine):
        for _ in range(times):
            listens(engine, sound)(None)
            engine.settle()


def heard(engine: Engine, sound: str) -> Seen:
    return judge(engine, listens(engine, sound))


def uuid_of_another(engine: Engine, first: str, second: str) -> Seen:
    """Two sounds under one `uuid`."""
    with audit_off(engine):
        listens(engine, first, first)(None)
    return judge(engine, listens(engine, second, first))


def train_the_encoder(worker: Any) -> None:
    made = torch.Generator().manual_seed(1)
    for weight in worker.model_runner.model.audio_tower.parameters():
        if weight.dim() > 1:
            weight.data.uniform_(-1.0, 1.0, generator=made)


def encoder_of_before(engine: Engine) -> Seen:
    """vLLM's encoder keeps over an update what it made before."""
    with mends.names_outlive_weights():
        with audit_off(engine):
            ask = listens(engine, "noise", "encoder")
            ask(None)
            engine.llm.collective_rpc(train_the_encoder)
            engine.forget_hbm()
            with mock.patch(f"{__name__}.forget_media"):
                ask(None)
        return judge(engine, ask)


# ---- a stranger, and moved KV ---------------------------------------------------------------


def leave_forged(engine: Engine, port: int, seed: str) -> None:
    """A stranger changes what the shared tier has, and takes each checksum anew."""
    join(engine)
    leave(engine, "the stranger's")
    leave(engine, seed)
    io = tier_of(engine)
    found = {chunk.name.key: chunk.name for chunk in chunks(engine)}
    whole = [name for name in found.values() if name.num_tokens == CHUNK]
    engine.wait_for(lambda: io.tier.num_used == len(whole))
    size = engine.side.geometry.slot_bytes
    settings = {"prefix": "as1/", "redis": {"url": f"redis://127.0.0.1:{port}", "timeout_s": 3.0}}
    server: Any = SimpleNamespace(settings=settings)
    stranger = Stranger(server, size)
    names = RecordNames(io.namespace, io.generation.usable or b"", io.keys)
    places = {name: names.of(name.key, name.tenant) for name in whole}
    values = {name: stranger.get(places[name]) for name in whole}
    theirs = {
        name.position: values[name]
        for name in whole
        if name.tokens[:4] == token_at("the stranger's", name.position)
    }
    for name in whole:
        if name.tokens[:4] == token_at(seed, name.position):
            payload = theirs[name.position][HEADER_BYTES:]
            digest = io.keys.digest(memoryview(payload))
            header = names.header(places[name], name, len(payload), digest)
            stranger.put(places[name], header + payload)
    stranger.close()


def token_at(seed: str, position: int) -> bytes:
    return random_tokens(seed, LENGTH)[position].to_bytes(4, "big")


def find_shared(engine: Engine, seed: str) -> Seen:
    join(engine)
    return find(engine, seed)


def turned_twice(engine: Engine) -> tuple[list[int], list[bool], dict[str, int]]:
    """What two cuts give and what one gives: see two_ways(). What the audit says of it."""
    before = events(engine, *OUTCOMES)
    with mends.moved_is_native():
        moved, same = two_ways(engine)
    engine.settle()
    return moved, same, {k: n - before[k] for k, n in events(engine, *OUTCOMES).items()}
