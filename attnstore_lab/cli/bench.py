# SPDX-License-Identifier: Apache-2.0
"""`attnstore bench replay`: hold conversations with a server, and say how long answers took.

`python -m benchmarks.compare` asks by the same options.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnstore_lab.bench.conversations import Conversation, read_conversations
from attnstore_lab.bench.gaps import read_gaps
from attnstore_lab.bench.schedule import THINK_FORMS, Load, Think, parse_think
from attnstore_lab.bench.summary import summary_text
from attnstore_vllm.cli.main import ends_on_the_spot
from attnstore_vllm.errors import ConfigError

if TYPE_CHECKING:
    from attnstore_lab.bench.client import RequestSettings
    from attnstore_lab.bench.replay import ReplayOutcome

EXIT_OK, EXIT_FAILED, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130
THINK = "lognormal:5,1"
"""For a first try, which should be over soon."""
EPILOG = """\
Requests are due at times that a seed fixes before the run; a slow server does not change them.
Two kinds of times are reported: from when a request was sent (ttft_ms, latency_ms), and from
when it was due (due_ttft_ms, due_latency_ms), with the waiting for the answer before it, for
--max-concurrency and for this program in it. docs/bench.md explains both.
Ctrl-C ends the run and prints what there is. Exit code: 0, 1 if a request failed, 2 if it could
not be done, 130 if it was interrupted.
"""


def add_arguments(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = benches.add_parser(
        "replay",
        help="hold conversations with any server that speaks the OpenAI API",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay.add_argument("--base-url", required=True, metavar="URL", help="http://127.0.0.1:8000")
    replay.add_argument("--model", required=True, metavar="NAME", help="as the server names it")
    replay.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="conversations, ShareGPT format"
    )
    asked = replay.add_argument_group("what is asked")
    add_requests(asked)
    asked.add_argument(
        "--fit",
        action="store_true",
        help="leave out conversations longer than the model's context (asks vLLM's /tokenize)",
    )
    asked.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="the key alone; sent as a bearer token"
    )
    asked.add_argument("--no-usage", action="store_true", help="do not ask for usage")
    add_load(replay.add_argument_group("when it is asked"))
    out = replay.add_argument_group("what is written")
    out.add_argument("--records", type=Path, metavar="FILE", help="JSON, one line a request")
    out.add_argument("--answers", action="store_true", help="in the records, the answers too")
    out.add_argument("--json", action="store_true", help="print the summary as JSON")


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Without what only a server of others needs."""
    group.add_argument(
        "--api",
        choices=("chat", "completions"),
        default="chat",
        help="texts (default), or token ids, for models whose text does not tokenize back; texts "
        "are turned into ids by the server's /tokenize, without a chat template",
    )
    group.add_argument(
        "--history",
        choices=("own", "data"),
        default="own",
        help="the model's own answers (default), or the file's",
    )
    group.add_argument(
        "--max-tokens",
        default="128",
        metavar="N",
        help="of an answer (128); data: as many as the file's answer has",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="answers have exactly --max-tokens (vLLM, SGLang)"
    )
    group.add_argument("--turns", type=int, metavar="N", help="of a conversation, at most")
    group.add_argument("--timeout", type=float, default=300.0, metavar="S", help="a request (300)")
    group.add_argument(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="more fields of each request's body; null takes one out",
    )


def add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        type=float,
        default=1.0,
        metavar="R",
        help="sessions that begin in a second, a Poisson process (1); inf: all at once",
    )
    group.add_argument(
        "--sessions",
        type=int,
        metavar="N",
        help="in all (each conversation once); more than "
        "there are conversations: again, beginning with another number",
    )
    group.add_argument(
        "--duration", type=float, default=math.inf, metavar="S", help="none begins later"
    )
    group.add_argument(
        "--think",
        default=THINK,
        metavar="KIND",
        help=f"seconds between the questions of a session: {THINK_FORMS} ({THINK}; people take "
        "longer: lognormal:60,1)",
    )
    group.add_argument("--think-scale", type=float, default=1.0, metavar="X", help="times X (1)")
    group.add_argument(
        "--think-from",
        choices=("question", "answer"),
        default="question",
        help="question (default): counted from when the question before was due, so that all due "
        "times are fixed; answer: from the end of its answer, so that users of a slow server "
        "return later",
    )
    group.add_argument(
        "--warmup",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the requests, the first ones due: sent and not counted (0)",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests at a time (no limit)"
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="(1)")


def load(args: argparse.Namespace) -> Load:
    """Raises: ConfigError, DatasetError."""
    kind, arguments = parse_think(args.think)
    after_answer = args.think_from == "answer"
    think = Think(kind=kind, scale=args.think_scale)
    if kind == "trace":
        gaps = read_gaps(Path(arguments[0]), thinks=after_answer)
        think = Think(kind=kind, gaps=gaps, scale=args.think_scale)
    elif arguments:
        try:
            first, sigma = [*map(float, arguments), 0.0][:2]
        except ValueError as error:
            raise ConfigError(f"--think: {args.think!r}: {error}") from error
        think = Think(kind=kind, first=first, sigma=sigma, scale=args.think_scale)
    return Load(
        rate=args.rate,
        sessions=args.sessions,
        duration_s=args.duration,
        turns=args.turns,
        think=think,
        after_answer=after_answer,
        warmup=args.warmup,
        seed=args.seed,
    )


def json_object(option: str, text: str) -> dict[str, Any]:
    """The object that was given for `option`. Raises ConfigError, which names it."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option}: expected a JSON object")
    return found


def settings(args: argparse.Namespace, model: str) -> RequestSettings:
    """Raises: ConfigError, without aiohttp too."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("aiohttp is not installed; pip install 'attnstore-vllm[bench]'")
    from attnstore_lab.bench.client import RequestSettings  # noqa: PLC0415  wants aiohttp

    if args.max_tokens != "data" and not args.max_tokens.isdecimal():
        raise ConfigError(f"--max-tokens: {args.max_tokens!r} was found; expected N or data")
    extra = json_object("--extra-body", args.extra_body)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError("--max-concurrency: expected 1 or more")
    return RequestSettings(
        model=model,
        api=args.api,
        history=args.history,
        max_tokens=None if args.max_tokens == "data" else int(args.max_tokens),
        ignore_eos=args.ignore_eos,
        timeout_s=args.timeout,
        extra=extra,
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code. Raises: AttnStoreError, OSError, also if the key cannot be read."""
    wanted = load(args)
    # From a file: a key on the command line is seen by everyone on the machine.
    key = args.api_key_file.read_text().strip() if args.api_key_file else None
    asking = replace(settings(args, args.model), usage=not args.no_usage, api_key=key)
    conversations = read_conversations(args.data)
    # An event loop that an interrupt leaves half made prints a traceback when it is deleted.
    with ends_on_the_spot("attnstore bench") as is_made:
        outcome = asyncio.run(_replay(args, conversations, wanted, asking, is_made))
    result = outcome.to_json() | {"options": options(args)}
    print(json.dumps(result) if args.json else summary_text(result))
    if outcome.trouble:
        print(f"attnstore bench: {outcome.trouble}", file=sys.stderr)
        return EXIT_ERROR
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if outcome.summary.num_failed else EXIT_OK


async def _replay(
    args: argparse.Namespace,
    conversations: list[Conversation],
    wanted: Load,
    asking: RequestSettings,
    begun: Callable[[], None],
) -> ReplayOutcome:
    begun()
    from attnstore_lab.bench.client import server_root  # noqa: PLC0415  want aiohttp
    from attnstore_lab.bench.replay import replay  # noqa: PLC0415
    from attnstore_lab.bench.tokens import as_ids, check_server, fitting  # noqa: PLC0415

    url = server_root(args.base_url)
    await check_server(url, asking)
    if args.api == "completions":
        conversations = await as_ids(url, conversations, asking)
    if args.fit:
        fit = await fitting(url, conversations, asking, turns=args.turns)
        print(f"{len(fit)} of {len(conversations)} conversations fit the context", file=sys.stderr)
        if not fit:
            raise ConfigError("--fit: no conversation fits the model's context")
        conversations = fit
    return await replay(
        url,
        conversations,
        wanted,
        asking,
        max_concurrency=args.max_concurrency,
        records=args.records,
        answers=args.answers,
    )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """All that the result depends on, as JSON has it."""
    hidden = {"command", "bench", "json", "handler"}
    values = {name: value for name, value in vars(args).items() if name not in hidden}
    return {
        name: str(value) if isinstance(value, Path) or value == math.inf else value
        for name, value in values.items()
    }
