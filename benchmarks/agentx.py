# SPDX-License-Identifier: Apache-2.0
"""AgentX, the field's benchmark of agents: local traces against a server with the store.

    python -m benchmarks.agentx [--model DIR] [--traces FILE] [--seconds N] [--serve ARGS]

1. `agentx-harness` is installed into an environment of its own (--env), never into this one.
2. Traces are cut to the model's context and written as the harness wants them, a file a session.
   Without a file of traces, sessions are made up.
3. `vllm serve` starts with the store, unless --url names a server; `agentx profile` asks it.

On vLLM's CPU build the model is a tiny one that is made here: this shows that all of it works, and
no figure of it says anything. With a GPU, only --model and the sizes change. A run counts for
AgentX from 900 seconds and 393 traces on; others are marked as not valid by the harness itself.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from attnstore_lab.testing.tiny_model import SMALL, make_model
from attnstore_vllm.errors import AttnStoreError, ConfigError
from benchmarks.quick import ROOT
from benchmarks.server import VllmServer

HARNESS: Final = "agentx-harness==1.0.12"
TRACES: Final = ROOT.parent / "shared" / "data" / "traces" / "claude_code_weka_sessions.jsonl.gz"
VALID_S: Final = 900
BLOCK_TOKENS: Final = 64
MADE_TURNS, MADE_GROWTH = 8, 6
"""Turns of a session that is made up, and blocks that each of them adds."""
NAME: Final = "bench"
SPARE_TOKENS: Final = 128
"""Of the context, for the chat template and for what the harness puts before a prompt."""
Session = dict[str, Any]


def installed(env: Path) -> Path:
    """The harness's program in an environment of its own, made if it is not there.

    Raises: AttnStoreError if it cannot be made.
    """
    program = env / "bin" / "agentx"
    if not program.exists():
        print(f"installing {HARNESS} into {env}", flush=True)
        for command in (
            [sys.executable, "-m", "venv", str(env)],
            [str(env / "bin" / "pip"), "install", "-q", HARNESS],
        ):
            if code := subprocess.run(command, check=False).returncode:
                raise AttnStoreError(f"{shlex.join(command)} ended with exit code {code}")
    return program


def read_sessions(path: Path) -> Iterator[Session]:
    """Of a file with a session a line, block hashes as runs or as a list. Sub-agents' requests are
    left out. Raises: ConfigError, OSError."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _session(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: no session: {error!r}") from error


def _session(given: Mapping[str, Any]) -> Session:
    requests = []
    for request in given["requests"]:
        if request["type"] not in ("n", "s"):
            continue
        ids = request.get("hash_ids")
        if ids is None:
            ids = [start + i for start, count in request["hash_rle"] for i in range(count)]
        kept = {name: value for name, value in request.items() if name != "hash_rle"}
        requests.append(kept | {"hash_ids": ids})
    return {**given, "requests": requests}


def made_up(count: int) -> Iterator[Session]:
    """Sessions that grow, with nothing in common."""
    for number in range(count):
        requests = [
            {
                "t": 5.0 * turn, "type": "n", "model": NAME, "in": BLOCK_TOKENS * blocks + 1,
                "out": 32, "stop": "tool_use", "api_time": 1.0, "think_time": 1.0,
                "hash_ids": list(range(1, blocks + 1)),
            }
            for turn in range(MADE_TURNS)
            for blocks in [MADE_GROWTH * (turn + 1)]
        ]  # fmt: skip
        yield {
            "id": f"made_{number:04}", "models": [NAME], "block_size": BLOCK_TOKENS,
            "hash_id_scope": "local", "requests": requests,
        }  # fmt: skip


def cut(session: Session, context_tokens: int, requests: int | None) -> Session:
    """The first requests, thinned out so that the longest fits.

    Every f-th block is kept, of all requests the same ones: what two prompts share, they still do.
    """
    kept = session["requests"][:requests]
    size = session["block_size"]
    most = max(request["in"] + request["out"] for request in kept)
    factor = -(-most // max(1, context_tokens - SPARE_TOKENS - 2 * size))
    if factor == 1:
        return {**session, "requests": kept}
    thinned = []
    for request in kept:
        ids = request["hash_ids"][::factor]
        tokens = len(ids) * size + request["in"] % size
        out = max(1, request["out"] // factor)
        thinned.append({**request, "hash_ids": ids, "in": tokens, "out": out})
    less = {name: session.get(name, 0) // factor for name in ("tool_tokens", "system_tokens")}
    return {**session, **less, "requests": thinned}


def write_traces(
    folder: Path, path: Path | None, *, count: int, context_tokens: int, requests: int | None
) -> int:
    """A file a session; returns how many. Raises: ConfigError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for session in made_up(count) if path is None else read_sessions(path):
        if written == count:
            break
        if len(session["requests"]) < 2:
            continue
        small = cut(session, context_tokens, requests)
        (folder / f"{session['id']}.json").write_text(json.dumps(small))
        written += 1
    if not written:
        raise ConfigError(f"{path} has no session of two requests")
    return written


def command(
    program: Path, url: str, model: str, traces: Path, out: Path, args: argparse.Namespace
) -> list[str]:
    """What asks the server. A run that cannot count says so: the harness marks its results."""
    found = [
        str(program), "profile",
        "--url", url, "--endpoint", "/v1/chat/completions",
        "--model", NAME if not args.url else args.model,
        "--tokenizer", model,
        "--custom-dataset-type", "weka-trace", "--input-file", str(traces),
        "--concurrency", str(args.concurrency),
        "--benchmark-duration", str(args.seconds),
        "--output-artifact-dir", str(out), "--ui", "none",
    ]  # fmt: skip
    if args.seconds < VALID_S:
        found += ["--unsafe-override", "--benchmark-grace-period", "30"]
        found += ["--warmup-requests-per-lane", "1", "--trace-idle-gap-cap-seconds", "2"]
    return [*found, *shlex.split(args.harness)]


def serve_arguments(args: argparse.Namespace, work: Path) -> list[str]:
    nvme = {"path": str(work / "kv"), "capacity": args.nvme}
    transfer = {
        "kv_connector": "AttnStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"dram": args.dram, "nvme": nvme},
    }
    found = ["--served-model-name", NAME, "--max-model-len", str(args.context)]
    if not args.plain:
        found += ["--kv-transfer-config", json.dumps(transfer)]
    return [*found, *shlex.split(args.serve)]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.agentx",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--model", help="a directory (a tiny model, made here)")
    options.add_argument("--url", help="of a server that runs; --model is its name there")
    options.add_argument("--tokenizer", help="a directory (the model's)")
    options.add_argument("--traces", type=Path, help="sessions, a line each (made up)")
    options.add_argument("--context", type=int, default=4096, help="tokens")
    options.add_argument("--sessions", type=int, default=8, help="at most (393 count)")
    options.add_argument("--requests", type=int, help="of a session, at most")
    options.add_argument("--concurrency", type=int, default=2)
    options.add_argument("--seconds", type=int, default=60, help=f"({VALID_S} and more count)")
    options.add_argument("--dram", default="256MiB")
    options.add_argument("--nvme", default="2GiB")
    options.add_argument("--plain", action="store_true", help="without the store")
    options.add_argument("--serve", default="--enforce-eager --num-gpu-blocks-override 64")
    options.add_argument("--harness", default="", help="more arguments of agentx profile")
    options.add_argument("--env", type=Path, default=ROOT / ".cache" / "agentx" / "env")
    options.add_argument("--out", type=Path, default=ROOT / ".cache" / "agentx" / "run")
    return options


def run(args: argparse.Namespace) -> int:
    """Returns the harness's exit code. Raises: AttnStoreError, OSError."""
    if args.url and not (args.model and args.tokenizer):
        raise ConfigError("--url needs --model, the name there, and --tokenizer, a directory")
    program = installed(args.env)
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        work = Path(
            undo.enter_context(tempfile.TemporaryDirectory(prefix="agentx-", dir="/var/tmp"))
        )
        path = args.traces or (TRACES if TRACES.exists() else None)
        written = write_traces(
            work / "traces", path, count=args.sessions, context_tokens=args.context,
            requests=args.requests,
        )  # fmt: skip
        print(f"{written} sessions of {path or 'our own making'}", flush=True)
        model, url = args.model, args.url
        if url is None:
            shape = replace(SMALL, max_position=args.context)
            model = model or str(make_model(work / "model", shape))
            server = VllmServer(model, serve_arguments(args, work), args.out / "server.log")
            url = undo.enter_context(server).base_url
        asking = command(
            program, url, args.tokenizer or model, work / "traces", args.out / "agentx", args
        )
        print(shlex.join(asking), flush=True)
        return subprocess.run(asking, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return run(args)
    except (AttnStoreError, OSError) as error:
        print(f"benchmarks.agentx: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
