# SPDX-License-Identifier: Apache-2.0
"""The demo: the same conversations against `vllm serve` without the store, then with it.

Both servers have the same flags, the same model and the same HBM, too small to keep a
conversation until its next turn. DRAM is small as well, so that some of the KV has to come back
from NVMe. The answers of both sides are compared; where one differs, it is checked against the
rounding that the server without the store shows when its prompts are split
elsewhere and come in other company.

    python -m benchmarks.demo
    python -m benchmarks.demo --dataset sharegpt.json --conversations 24
    python -m benchmarks.demo --base-url http://127.0.0.1:8000 --model NAME
    python -m benchmarks.demo --json results/demo.json      what README.md quotes, measured anew
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from attnstore_lab.bench.client import RequestError, RequestSettings, open_http
from attnstore_lab.bench.closed_loop import take_turns
from attnstore_lab.bench.conversations import Conversation, DatasetError, read_conversations
from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.records import TurnRecord, failures
from attnstore_lab.bench.talk import Talk
from attnstore_lab.bench.tokens import fitting
from attnstore_lab.bench.traffic import traffic
from attnstore_lab.testing.tiny_model import SMALL, make_model
from attnstore_vllm.prometheus import Metrics
from benchmarks.agreement import compare, gap_changes, rounding_bound
from benchmarks.demo_report import (
    Side,
    Verdict,
    in_one_sentence,
    plot,
    report_table,
    summary,
    verdict_json,
    verdict_text,
)
from benchmarks.sample import SAMPLE
from benchmarks.server import ServerError, VllmServer, read_metrics

T = TypeVar("T")
ROOT: Final = Path(__file__).parent.parent
NAMES: Final = ("vLLM alone", "with AttnStore")
CONTEXT_TOKENS: Final = 4_096
BLOCK_TOKENS: Final = 128
MAX_TOKENS: Final = 128
TOP_LOGPROBS: Final = 5
ASKED_AGAIN: Final = 12  # questions at least, to see how far rounding moves answers
TOGETHER: Final = 4  # of them at the same time: more than in the replay
WARM_UP: Final = Conversation("warm-up", ("Once upon a time. " * 300, "And then? " * 50))


def main() -> int:
    """Run the demo. Returns 0, 1 if a request failed or an answer is wrong, 2 if it cannot run."""
    args = arguments()
    # An end from outside must not leave a server behind: let the context managers run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        conversations = read_conversations(args.dataset)
        return _demo(args, conversations)
    except (DatasetError, RequestError, ServerError, aiohttp.ClientError) as error:
        print(f"The demo cannot run: {error}", file=sys.stderr)
        return 2


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", type=Path, default=SAMPLE, help="a file in ShareGPT format")
    parser.add_argument("--conversations", type=int, default=16, help="at most so many")
    parser.add_argument("--turns", type=int, help="at most so many turns of each")
    parser.add_argument("--clients", type=int, default=2, help="how many ask at the same time")
    parser.add_argument("--model", help="a path or name; by default a small one is made")
    parser.add_argument("--base-url", help="replay against this server only, e.g. http://host:8000")
    parser.add_argument("--hbm-tokens", type=int, default=40 * BLOCK_TOKENS, help="KV in HBM")
    parser.add_argument("--dram", default="128MiB", help="DRAM of the store")
    parser.add_argument("--nvme", default="2GiB", help="NVMe of the store")
    parser.add_argument("-v", "--verbose", action="store_true", help="print all counters too")
    parser.add_argument("--workdir", type=Path, default=ROOT / ".cache" / "demo")
    # Not results/demo.json, which README.md quotes and whose run is known: a test compares the two.
    parser.add_argument("--json", type=Path, default=ROOT / ".cache" / "demo" / "demo.json")
    args = parser.parse_args(argv)
    if args.base_url and not args.model:
        parser.error("--base-url needs --model, the name the server gives its model")
    if args.hbm_tokens < CONTEXT_TOKENS:
        parser.error(f"--hbm-tokens must be at least {CONTEXT_TOKENS}, one whole context")
    return args


def _awaited(asked: Coroutine[Any, Any, T]) -> T:
    """What requests give. An end from outside cancels them: raised in the midst of one, as
    elsewhere, it would leave the others as they are."""

    async def run() -> T:
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert this is not None
        before = signal.getsignal(signal.SIGTERM)
        loop.add_signal_handler(signal.SIGTERM, this.cancel)
        try:
            return await asked
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


def _demo(args: argparse.Namespace, conversations: list[Conversation]) -> int:
    model = args.model
    if model is None:
        model = str(make_model(args.workdir / "model", SMALL))
    settings = RequestSettings(
        model=model, max_tokens=MAX_TOKENS, ignore_eos=True, top_logprobs=TOP_LOGPROBS
    )
    if args.base_url:
        url = args.base_url.rstrip("/")
        chosen = _awaited(_choose(args, url, conversations, settings))
        side = _awaited(_side(args, url, url, chosen, settings, lambda: read_metrics(url)))
        return _finish(args, settings, [side], None)

    print(f"1/4  vllm serve without the store (log: {args.workdir / 'alone.log'})")
    with VllmServer(model, _flags(args), args.workdir / "alone.log") as server:
        url, metrics = server.base_url, server.metrics
        chosen = _awaited(_choose(args, url, conversations, settings))
        alone = _awaited(_side(args, NAMES[0], url, chosen, settings, metrics))
        print("2/4  the same server, asked otherwise: how far does rounding move its answers?")
        pairs = _awaited(ask_again(url, chosen, settings, alone.records))
    # Each pair on its own: all have the history of the replay, and not others' answers.
    changes = [change for x, y in pairs for change in gap_changes([x], [y])]

    yaml = _write_settings(args)
    print(f"3/4  vllm serve --kv-transfer-config {yaml} (log: {args.workdir / 'store.log'})")
    flags = [*_flags(args), "--kv-transfer-config", str(yaml)]
    with VllmServer(model, flags, args.workdir / "store.log") as server:
        url, metrics = server.base_url, server.metrics
        stored = _awaited(_side(args, NAMES[1], url, chosen, settings, metrics))
    between = gap_changes(alone.records, stored.records)
    verdict = Verdict(
        agreement=compare(alone.records, stored.records),
        bound=rounding_bound(changes),
        bound_positions=len(changes),
        largest_change=max(between, default=0.0),
        positions=len(between),
    )
    print("4/4  results")
    return _finish(args, settings, [alone, stored], verdict)


def _flags(args: argparse.Namespace) -> list[str]:
    """The flags of both servers. vLLM's own prefix cache is on."""
    return [
        "--max-model-len", str(CONTEXT_TOKENS),
        "--block-size", str(BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(args.hbm_tokens // BLOCK_TOKENS),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip


def _write_settings(args: argparse.Namespace) -> Path:
    """Write attnstore.yaml for an empty store; return its path."""
    store = args.workdir.resolve() / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    yaml: Path = args.workdir.resolve() / "attnstore.yaml"
    nvme = f"{{path: {json.dumps(str(store))}, capacity: {args.nvme}}}"
    yaml.write_text(f"dram: {args.dram}\nnvme: {nvme}\n", encoding="utf-8")
    return yaml


async def _choose(
    args: argparse.Namespace, url: str, conversations: list[Conversation], settings: RequestSettings
) -> list[Conversation]:
    """The first conversations that fit the context. Raises: RequestError if none does."""
    fit = await fitting(url, conversations, settings, turns=args.turns)
    if not fit:
        raise RequestError(f"none of {len(conversations)} conversations fits the context")
    chosen = fit[: args.conversations]
    turns = sum(len(c.questions[: args.turns]) for c in chosen)
    print(
        f"     {len(chosen)} conversations with {turns} turns; {len(fit) - len(chosen)} more "
        f"would fit, {len(conversations) - len(fit)} exceed the context and are skipped"
    )
    return chosen


async def _side(
    args: argparse.Namespace,
    name: str,
    url: str,
    conversations: Sequence[Conversation],
    settings: RequestSettings,
    metrics: Callable[[], Metrics],
) -> Side:
    """Warm one server up, then replay against it."""
    await take_turns(url, [WARM_UP], replace(settings, max_tokens=16), progress=False)
    before = metrics()
    started = time.perf_counter()
    records = await take_turns(
        url,
        conversations,
        settings,
        clients=args.clients,
        turns=args.turns,
        title=f"     {name}",
    )
    seconds = time.perf_counter() - started
    return Side(name, records, traffic(before, metrics()), seconds)


async def ask_again(
    url: str,
    conversations: Sequence[Conversation],
    settings: RequestSettings,
    records: Sequence[TurnRecord],
) -> list[tuple[TurnRecord, TurnRecord]]:
    """Ask vLLM alone questions of the replay again, split elsewhere and in other company.

    Each has a cache salt of its own, so vLLM's cache has nothing of it.
    At first they come one by one: the prompt is computed whole, the answer with no other. Then a
    few come together: each prompt is split at its last whole block. The replay had two together,
    and prompts that begin with the KV of earlier answers.

    Last questions come first: their prompts are the longest. Of a short demo all are asked, then
    all again with another beginning, until there are `ASKED_AGAIN`.

    Returns: pairs of answers to one prompt.
    """
    held: dict[str, list[TurnRecord]] = {}
    for record in records:
        held.setdefault(record.conversation_id, []).append(record)
    complete = [c for c in conversations if not failures(held[c.id])]
    # Stable: the last turns of all conversations, then those before them.
    all_asked = sorted(
        ((c, record) for c in complete for record in held[c.id]),
        key=lambda asked: len(held[asked[0].id]) - asked[1].turn,
    )
    wanted = max(ASKED_AGAIN, len(complete)) if complete else 0

    async def client(http: aiohttp.ClientSession, first: int, step: int) -> dict[int, TurnRecord]:
        answers = {}
        for n in range(first, wanted, step):
            use, place = divmod(n, len(all_asked))
            conversation, replayed = all_asked[place]
            salted = replace(settings, extra={**settings.extra, "cache_salt": f"again-{n}"})
            talk = Talk(conversation, salted, use)
            for turn, record in enumerate(held[conversation.id][: replayed.turn - 1]):
                talk.question(turn)
                talk.answer(turn, record)
            answers[n] = TurnRecord(conversation_id=conversation.id, turn=replayed.turn)
            await talk.ask(http, url, replayed.turn - 1, answers[n])
        return answers

    async with open_http(settings) as http:
        alone = await client(http, 0, 1)
        parts = await asyncio.gather(*(client(http, n, TOGETHER) for n in range(TOGETHER)))
    together = {n: answer for part in parts for n, answer in part.items()}
    # Those of another beginning have no answer of the replay beside them.
    replayed = [(record, alone[n]) for n, (_, record) in enumerate(all_asked[:wanted])]
    return replayed + [(alone[n], together[n]) for n in alone]


def _finish(
    args: argparse.Namespace,
    settings: RequestSettings,
    sides: list[Side],
    verdict: Verdict | None,
) -> int:
    """Print the tables, write the files; return the exit code."""
    print(f"\n{report_table(sides, counters=args.verbose)}\n")
    if verdict is not None:
        print(verdict_text(verdict))
    failed = [(side, record) for side in sides for record in failures(side.records)]
    for side, record in failed:
        print(f"FAILED, {side.name}: {record.conversation_id}, turn {record.turn}: {record.error}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine(),
        "settings": {
            "dataset": args.dataset.name,
            "conversations": len({r.conversation_id for r in sides[0].records}),
            "model": settings.model if args.model else "benchmarks' small model (26M parameters)",
            "clients": args.clients,
            "turns": args.turns,
            "max_tokens": settings.max_tokens,
            "hbm_tokens": None if args.base_url else args.hbm_tokens,
            "dram": None if args.base_url else args.dram,
            "nvme": None if args.base_url else args.nvme,
        },
        "sides": [summary(side) for side in sides],
        "agreement": verdict_json(verdict) if verdict else None,
        "records": {side.name: [r.to_json() for r in side.records] for side in sides},
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    picture = args.json.with_suffix(".svg")
    plot(result, picture)
    print(f"\nwritten: {args.json}, {picture}")
    wrong = verdict.unexplained if verdict else 0
    if failed:
        print(f"{len(failed)} requests FAILED", file=sys.stderr)
    if wrong:
        print(f"{wrong} answers differ by MORE THAN ROUNDING", file=sys.stderr)
    if not failed and not wrong:
        print(f"\n{in_one_sentence(sides)}")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
