# SPDX-License-Identifier: Apache-2.0
"""A random mix of all that can come together: python -m tests.vllm.mix [--seeds N] [--first SEED]

It is long since all that comes together is drawn in one place.

vLLM's scheduler and both our sides over the scripted worker, whose KV depends on everything that a
real model's does: tokens, pictures and where they stand, adapter and weights; and on the tenant,
so that what crosses tenants is seen. So each position that a forward pass attends to is checked,
wherever its KV comes from. At the end all that was ever asked is asked again, from the store.
A failure prints its seed; `--first SEED --seeds 1` plays it again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.identity.live_lora import LiveAdapters
from attnstore_vllm.index.keys import (
    encode_tokens,
)
from tests.vllm.mix_parts import (
    FILES,
    LENGTH_MAX,
    PICTURES,
    PLACEHOLDER,
    SECRET,
    Adapters,
    Input,
    Shape,
    World,
    check_stored,
    cut,
)
from tests.vllm.scripted import CHUNK, Limits, ScriptedEngine
from tests.vllm.scripted_worker import Picture, Row
from tests.vllm.stepped import SteppedEngine, leave_to_chance
from tests.vllm.test_async_scheduling import wait_until_quiet


class Mix:
    """One run. All that it does follows from the seed (not how quick the disk is)."""

    def __init__(self, model: Path, directory: Path, seed: int) -> None:
        self.random = Random(seed)
        self.shape = Shape.draw(self.random)
        self.counts: Counter[str] = Counter()
        self._model, self._directory, self._seed = model, directory, seed
        self._texts = [[self.random.randrange(PLACEHOLDER) for _ in range(150)] for _ in range(3)]
        self._adapters = Adapters()
        self._weights = FILES
        self._worlds: dict[str, World] = {}
        self._asked: list[tuple[World, Row]] = []
        """All that ever ran, on any engine."""
        self._secrets: list[bytes] = []
        self._number = 0
        self._start()

    # ---- engines -----------------------------------------------------------------------

    def _start(self) -> None:
        shape = self.shape
        self._number_of_pictures = 0
        options: dict[str, Any] = {
            "num_blocks": shape.num_blocks,
            "depth": shape.depth,
            "policy": shape.policy,
            "seed": self.random.randrange(1 << 30),
            "limits": Limits(dram_slots=shape.dram_slots),
        }
        store = self._directory / "store"
        self.engine: ScriptedEngine
        if shape.beside:
            self.engine = SteppedEngine(self._model, store, rows=6, **options)
            leave_to_chance(self.engine, self.random.randrange(1 << 30))
        else:
            self.engine = ScriptedEngine(self._model, store, drafts=shape.drafts, **options)
        self._sessions: dict[str, int] = {}
        """Tokens that each may have at most by now, with all that it will have said."""
        wait_until_quiet(self.engine.ours)  # it has found what is there
        worker = self.engine.worker
        worker.side.adapters = LiveAdapters([self._adapters])
        worker.base = self._base
        worker.deluded = lambda name: shape.deludes_sessions and name.startswith("session")

    def _base(self, new: NewRequestData) -> bytes:
        world = self._worlds[new.req_id]
        return b" ".join(
            (self._weights, self._adapters.content(world.adapter), repr(world.salt).encode())
        )

    def _remember(self) -> None:
        worker = self.engine.worker
        self._asked += [(self._worlds[row.name], row) for row in worker.rows]
        self.counts["loaded tokens"] += worker.loaded_tokens
        self.counts["rows"] += len(worker.rows)
        worker.rows.clear()
        worker.loaded_tokens = 0

    def close(self) -> None:
        self.engine.close()

    # ---- what is asked -----------------------------------------------------------------

    def _some_text(self) -> list[int]:
        text = self.random.choice(self._texts)
        if self.random.random() < 0.3:
            text = [self.random.randrange(PLACEHOLDER) for _ in range(60)]
        return text[: self.random.randrange(1, len(text))]

    def _some_input(self, room: int) -> Input:
        """Text, and pictures in it; the same text comes with other pictures, too."""
        tokens: list[int] = []
        pictures: list[Picture] = []
        if self.random.random() < 0.5:  # many begin alike, so that the picture alone differs
            tokens += self._texts[0][: self.random.choice((20, CHUNK, 50))]
        for _ in range(self.random.randrange(4)):
            if self.random.random() < 0.6:
                name = self.random.choice(list(PICTURES))
                before = self.random.choice((0, 0, 1, 5))  # a user may write placeholders as well
                pictures.append(Picture(name, len(tokens) + before, PICTURES[name]))
                tokens += [PLACEHOLDER] * (PICTURES[name] + 5)
            else:
                tokens += self._some_text()
        return cut((tokens or self._some_text(), pictures), room)

    def _continued(self, room: int) -> tuple[Input, World]:
        """What somebody has said before, as a rule cut somewhere, and more."""
        now = [(self._worlds[row.name], row) for row in self.engine.worker.rows]
        world, row = self.random.choice([*self._asked, *now][-30:])
        if world.is_secret or not row.tokens:
            return self._some_input(room), self._some_world()
        stop = min(room, len(row.tokens))
        if self.random.random() < 0.5:
            stop = self.random.randrange(1, stop + 1)
        tokens, pictures = cut((list(row.tokens), list(row.pictures)), stop)
        more, seen = self._some_input(room - len(tokens))
        pictures += [Picture(p.content, p.offset + len(tokens), p.length) for p in seen]
        if self.random.random() < 0.2:
            world = self._some_world()  # the same words of another tenant, or to another adapter
        return (tokens + more, pictures), world

    def _some_world(self) -> World:
        return World(self.random.choice((None, "a", "b")), self.random.choice((0, 0, 1, 2, 3)))

    def _named(self, content: str) -> str:
        if not self.shape.counted:
            return content
        self._number_of_pictures += 1
        return f"renderer0-mm-{self._number_of_pictures}-image-0"

    def _submit(self, name: str, asked: Input, new_tokens: int, **how: Any) -> None:
        world = self._worlds[name]
        draw = self.random.random()
        params = None
        if draw < 0.08:
            params = {"attnstore": {"store": False}}
            secret = [self.random.randrange(PLACEHOLDER) for _ in range(SECRET)]
            asked = ([*asked[0], *secret], asked[1])
            world = self._worlds[name] = replace(world, is_secret=True)
            self._secrets += [
                encode_tokens(secret[: SECRET // 2]),
                encode_tokens(secret[SECRET // 2 :]),
            ]
        elif draw < 0.2:
            hints: tuple[Any, ...] = ({"priority": "high"}, {"ttl": "1h"}, {"pin": True}, "odd")
            params = {"attnstore": self.random.choice(hints)}
        elif draw < 0.25:
            how["prompt_logprobs"] = 1
        self.counts["pictures"] += len(asked[1])
        self.engine.add(
            name,
            asked[0],
            new_tokens,
            self.random.randrange(3),
            params,
            pictures=asked[1],
            named=self._named,
            salt=world.salt,
            lora=self._adapters.request(world.adapter),
            **how,
        )

    def _new_name(self, kind: str, world: World) -> str:
        self._number += 1
        name = f"{kind} {self._number}"
        self._worlds[name] = world
        return name

    def ask(self) -> None:
        """An ordinary request."""
        if (self._asked or self.engine.worker.rows) and self.random.random() < 0.6:
            asked, world = self._continued(LENGTH_MAX)
        else:
            asked, world = self._some_input(LENGTH_MAX), self._some_world()
        self._submit(self._new_name("request", world), asked, self.random.choice((1, 10, 50, 120)))

    def open_session(self) -> None:
        if len(self._sessions) < 2:
            world = self._some_world()
            name = self._new_name("session", world)
            self._sessions[name] = 0
            self._say(name)

    def go_on(self) -> None:
        """The next input of a session, which may wait for it, or still be busy."""
        self._sessions = {n: s for n, s in self._sessions.items() if self._is_open(n)}
        for name in list(self._sessions):
            if self.random.random() < 0.5:
                self._say(name)

    def _say(self, name: str) -> None:
        new_tokens = self.random.choice((1, 2, 10, 40))
        room = LENGTH_MAX - self._sessions[name] - new_tokens
        if room < 60 or self.random.random() < 0.1:
            self.end_session(name)
            return
        # vLLM's drafts beyond a stop may be more than a short input, and then it dies.
        asked = self._some_input(room - 10)
        asked = (asked[0] + self._texts[1][:10], asked[1])
        self._sessions[name] += len(asked[0]) + SECRET + new_tokens
        self.counts["inputs of sessions"] += 1
        self._submit(name, asked, new_tokens, resumable=True)

    def _is_open(self, name: str) -> bool:
        request = self.engine.scheduler.requests.get(name)
        return request is not None and not request.is_finished()

    def end_session(self, name: str) -> None:
        self._sessions.pop(name)
        if self._is_open(name):
            self.engine.add(name, [1], 1)

    def abort(self) -> None:
        if self.engine.scheduler.requests:
            name = self.random.choice(list(self.engine.scheduler.requests))
            self.engine.abort(name)
            self._sessions.pop(name, None)

    # ---- what else happens -------------------------------------------------------------

    def steps(self) -> None:
        for _ in range(self.random.randrange(12)):
            self.engine.step()

    def pause(self) -> None:
        self.engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self.steps()
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def reset_running(self) -> None:
        """All that runs loses its blocks, as by preemption."""
        if self.shape.may_reset:
            self._reset(connector=False)

    def _reset(self, *, connector: bool) -> None:
        try:
            self.engine.scheduler.reset_prefix_cache(True, connector)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise

    def reset_connector(self) -> None:
        self.engine.scheduler.reset_connector_cache()

    def settle(self) -> None:
        """To the end of all requests; HBM is empty, so that hits come from the store."""
        engine = self.engine
        for name in list(self._sessions):
            self.end_session(name)
        for _ in range(100):
            engine.step()
        # Two sessions with blocks may stand in each other's way: vLLM preempts what runs alone.
        for name in [n for n in engine.scheduler.requests if n.startswith("session")]:
            engine.abort(name)
        if isinstance(engine, SteppedEngine):
            engine.settle()
        engine.drain()
        wait_until_quiet(engine.ours)
        assert engine.scheduler.reset_prefix_cache()
        self._remember()
        self._check_stored()

    def new_weights(self) -> None:
        """While requests run, which begin anew."""
        engine, scheduler = self.engine, self.engine.scheduler
        if not self.shape.may_reset:
            self.settle()
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for name in list(self._sessions):  # those that wait for input would keep their blocks
            engine.abort(name)
        self._sessions.clear()
        for _ in range(300):
            while engine.in_flight:
                engine.finish_oldest()
            try:
                done = scheduler.reset_prefix_cache(True, reset_connector=True)
            except RuntimeError as error:
                if "Failed to reset KV cache" not in str(error):
                    raise
                done = False
            if done:
                break
            engine.step()
        else:
            raise AssertionError("no reset succeeded")
        self.counts["new weights"] += 1
        self._weights = f"weights {self.random.random()}".encode()
        engine.worker.change_base()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def replace_adapter(self) -> None:
        self.settle()
        self._adapters.replace(self.random.choice((1, 2, 3)))

    def restart(self) -> None:
        """On the same directory. The weights are again those of the files."""
        self.settle()
        self.engine.close()
        self._weights = FILES
        self.counts["restarts"] += 1
        self._start()

    # ---- a run -------------------------------------------------------------------------

    def run(self, events: int) -> None:
        often = (self.ask, self.ask, self.open_session, self.go_on, self.go_on, self.go_on)
        seldom = (self.abort, self.pause, self.reset_running, self.reset_connector)
        rarely = (self.settle, self.settle, self.new_weights, self.replace_adapter, self.restart)
        for _ in range(events):
            draw = self.random.random()
            kinds = rarely if draw < 0.05 else seldom if draw < 0.15 else often
            self.random.choice(kinds)()
            self.steps()
        self.settle()
        self._ask_all_again()

    def _check_stored(self) -> None:
        self.counts += check_stored(
            self.engine, self._asked, self._adapters, self._secrets, counted=self.shape.counted
        )

    def _ask_all_again(self) -> None:
        """Whoever asks for the same gets the KV of now, or none."""
        asked = self._asked[-60:]
        for world, row in asked:
            if world.is_secret or self.random.random() < 0.5:
                continue
            self._worlds[name := self._new_name("again", world)] = world
            tokens, pictures = cut((list(row.tokens), list(row.pictures)), LENGTH_MAX)
            if tokens:
                self.engine.add(
                    name,
                    tokens,
                    1,
                    pictures=pictures,
                    named=self._named,
                    salt=world.salt,
                    lora=self._adapters.request(world.adapter),
                )
        self.settle()


def play(model: Path, seed: int, events: int = 120) -> Counter[str]:
    """One seed. Raises AssertionError when anything is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        mix = Mix(model, Path(directory), seed)
        try:
            mix.run(events)
        finally:
            mix.close()
        return mix.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--events", type=int, default=120)
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", TINY, weights=False)
        for seed in tqdm(range(args.first, args.first + args.seeds), unit="seed"):
            try:
                counts += play(model, seed, args.events)
            except BaseException:
                print(f"seed {seed}: {Shape.draw(Random(seed))}")
                raise
    print(f"{args.seeds} seeds, no wrong byte: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
