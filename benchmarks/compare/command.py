# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compare`: start one server after the other, ask each the same, compare."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from attnstore_lab.bench.conversations import read_conversations
from attnstore_lab.bench.summary import table
from attnstore_lab.cli import bench
from attnstore_vllm.config.values import SIZE_MIN, format_size, parse_size
from attnstore_vllm.errors import AttnStoreError, ConfigError
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.model_shape import shape_of

if TYPE_CHECKING:
    from benchmarks.compare.run import Comparison, Running
    from benchmarks.compare.sizes import Sizes
    from benchmarks.compare.systems import Here, System

CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS = 128, 16
LETTERS_A_TOKEN = 4
NAMES = "re, vllm, attnstore, attnstore-lru, attnstore-fifo, bound, example, offloading, lmcache"
EPILOG = f"""\
Systems, in the order in which they run: {NAMES}.
`re` has no prefix cache at all, `vllm` its own in HBM, `bound` the same with HBM for everything.
Ratios are over `re` and over `bound`. What is measured, and how: docs/bench.md.
Ctrl-C ends the server that runs and prints what there is; so do SIGTERM and SIGHUP. Exit code: 0,
1 if a request failed, 2 if it could not be done, 130 if it was interrupted.
"""
LEGEND = """\
TTFT in ms, from when a question was sent, of turn 1 and of turn 2 and later. hits: of all prompt
tokens, those that were not computed. of unlimited: of what a cache that loses nothing would find,
the history of each session. prefill: {prefill}."""
PREFILL_BY = {
    "steps": """length of the engine's steps that compute prompts, with
what they generate for others (vLLM's --enable-logging-iteration-details)""",
    "requests": """vLLM's request_prefill_time_seconds, from first scheduled
to first token; requests that share a step count it several times""",
}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--model", required=True, metavar="MODEL", help="as for vllm serve")
    options.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="conversations, ShareGPT format"
    )
    options.add_argument("--systems", default="all", metavar="A,B,...", help="see below (all)")
    options.add_argument(
        "--serve", default="", metavar="ARGS", help="for each server: --serve='--dtype half'"
    )
    options.add_argument(
        "--store", default="{}", metavar="JSON", help="more settings of this store"
    )
    sizes = options.add_argument_group("sizes (default: scaled to the working set of the load)")
    sizes.add_argument("--max-model-len", type=int, metavar="N", help="(the model's)")
    sizes.add_argument("--block-tokens", type=int, metavar="N", help="(16; CPU build: 128)")
    sizes.add_argument("--hbm-tokens", type=int, metavar="N", help="KV of every server but bound")
    sizes.add_argument("--dram", metavar="SIZE", help="of the store, as in 4GiB")
    sizes.add_argument("--nvme", metavar="SIZE", help="of the store")
    sizes.add_argument("--kv-bytes-per-token", type=int, metavar="N", help="(from config.json)")
    bench.add_requests(options.add_argument_group("what is asked"))
    bench.add_load(options.add_argument_group("when it is asked"))
    out = options.add_argument_group("what is written")
    out.add_argument(
        "--out",
        type=Path,
        default=Path("compare"),
        metavar="DIR",
        help="compare.json, compare.svg, and of each system records and log (compare)",
    )
    out.add_argument("--workdir", type=Path, metavar="DIR", help="for KV on NVMe (--out)")
    out.add_argument("--json", action="store_true", help="print the JSON, not the table")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = parser().parse_args(argv)
    try:
        return run(args)
    except (AttnStoreError, OSError) as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        return bench.EXIT_ERROR


def run(args: argparse.Namespace) -> int:
    """Returns the exit code. Raises: AttnStoreError, OSError."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("aiohttp is not installed; pip install 'attnstore-vllm[bench]'")
    from attnstore_lab.bench.environment import machine  # noqa: PLC0415  runs git
    from benchmarks.compare.run import Asked, Comparer  # noqa: PLC0415  want aiohttp
    from benchmarks.compare.systems import SERVED_NAME, chosen, why_not  # noqa: PLC0415

    systems = chosen(args.systems)
    load, asking = bench.load(args), bench.settings(args, SERVED_NAME)
    conversations = read_conversations(args.data)
    here = look_around(args)
    asked = Asked(
        conversations=conversations,
        load=load,
        settings=asking,
        max_concurrency=args.max_concurrency,
        step_times=here.is_cpu_build,
    )
    sizes = sizes_for(args, asked, here)
    not_run = {s.name: why for s in systems if (why := why_not(s, sizes, here)) is not None}
    args.out.mkdir(parents=True, exist_ok=True)
    tell_sizes(sizes)
    head = {"machine": machine(), "options": bench.options(args), "sizes": asdict(sizes)}
    comparer = Comparer(
        asked,
        starter(args, sizes, here),
        out=args.out,
        scratch=args.workdir or args.out,
        tell=_say,
        keep=lambda result: _write(args.out, head | result.to_json()),
    )
    with _ended_by_signals():
        result = comparer.run(systems, not_run)
    return _finish(args, head | result.to_json(), result)


def look_around(args: argparse.Namespace) -> Here:
    from benchmarks.compare.systems import Here  # noqa: PLC0415
    from benchmarks.server import is_cpu_build  # noqa: PLC0415

    where = (args.workdir or args.out).absolute()
    while not where.exists():
        where = where.parent
    return Here(
        is_cpu_build=is_cpu_build(),
        free_bytes=shutil.disk_usage(where).free,
        has_lmcache=importlib.util.find_spec("lmcache") is not None,
    )


def sizes_for(args: argparse.Namespace, asked: Any, here: Here) -> Sizes:
    """Raises: ConfigError if the model's files do not say what is needed."""
    from benchmarks.compare.sizes import sized  # noqa: PLC0415

    config, count = _model_files(args.model)
    text = config.get("text_config") or config
    context = args.max_model_len or text.get("max_position_embeddings")
    if not context:
        raise ConfigError(f"{args.model}: its config.json has no length; say --max-model-len N")
    for name in ("max_model_len", "block_tokens", "hbm_tokens", "kv_bytes_per_token"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected 1 or more")
    kv_bytes = args.kv_bytes_per_token
    if kv_bytes is None:
        try:
            shape = shape_of(config, args.model)
            kv_bytes = shape.token_bytes(Reach.FULL, Reach.WINDOW, Reach.LOCAL)
        except ConfigError as error:
            raise ConfigError(f"{error}; or say --kv-bytes-per-token N") from error
    return sized(
        asked.conversations, asked.load, asked.settings, count,
        kv_bytes_per_token=kv_bytes,
        context_tokens=int(context),
        block_tokens=args.block_tokens
        or (CPU_BLOCK_TOKENS if here.is_cpu_build else GPU_BLOCK_TOKENS),
        hbm_tokens=args.hbm_tokens,
        dram_bytes=parse_size("--dram", args.dram, SIZE_MIN) if args.dram else None,
        nvme_bytes=parse_size("--nvme", args.nvme, SIZE_MIN) if args.nvme else None,
    )  # fmt: skip


def _model_files(model: str) -> tuple[dict[str, Any], Callable[[str], int]]:
    """A model's config, and how many tokens a text has: by its tokenizer, or four letters each."""
    config = _model_file(model, "config.json")
    if config is None:
        raise ConfigError(
            f"--model: {model!r} is no directory with a config.json, and not among the downloaded "
            "models; give a path, or download it first (huggingface-cli download)"
        )
    tokenizer = _model_file(model, "tokenizer.json")
    if tokenizer is None or importlib.util.find_spec("tokenizers") is None:
        return json.loads(config.read_text()), lambda text: len(text) // LETTERS_A_TOKEN + 1
    from tokenizers import Tokenizer  # noqa: PLC0415  vLLM brings it

    known = Tokenizer.from_file(str(tokenizer))
    return json.loads(config.read_text()), lambda text: len(known.encode(text).ids)


def _model_file(model: str, name: str) -> Path | None:
    path = Path(model) / name
    if path.exists():
        return path
    if Path(model).exists() or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  vLLM brings it

    try:
        found = try_to_load_from_cache(model, name)
    except ValueError:  # a path that is none of a repository
        return None
    return Path(found) if isinstance(found, str) else None


def tell_sizes(sizes: Sizes) -> None:
    _say(
        f"working set: about {sizes.working_set_tokens:,} tokens, "
        f"{format_size(sizes.working_set_tokens * sizes.kv_bytes_per_token)} of KV; HBM for "
        f"{sizes.hbm_tokens:,} tokens (bound: {sizes.bound_tokens:,}), DRAM "
        f"{format_size(sizes.dram_bytes)}, NVMe {format_size(sizes.nvme_bytes)}"
    )
    if sizes.hbm_holds_all:
        _say(
            "HBM holds the whole working set: nothing is lost from it, and all caches are alike. "
            "Try more --sessions, or a smaller --hbm-tokens"
        )


def starter(
    args: argparse.Namespace, sizes: Sizes, here: Here
) -> Callable[[System, Path, Path], AbstractContextManager[Running]]:
    """How a system is started. Raises: ConfigError."""
    from benchmarks.compare.lmcache import with_daemon  # noqa: PLC0415
    from benchmarks.compare.systems import (  # noqa: PLC0415
        arguments,
        check_more,
        environment,
    )
    from benchmarks.server import VllmServer, free_port  # noqa: PLC0415

    store = bench.json_object("--store", args.store)
    try:
        more = shlex.split(args.serve)
    except ValueError as error:
        raise ConfigError(f"--serve: {error}") from error
    check_more(more)

    def start(system: System, directory: Path, log: Path) -> AbstractContextManager[Running]:
        port = free_port()
        flags = arguments(system, sizes, str(directory), store=store, more=more, port=port)
        server = VllmServer(args.model, flags, log, environment=environment(system, sizes))
        if system.name != "lmcache":
            return server
        return with_daemon(server, sizes, directory, port)

    return start


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal are as Ctrl-C: no server is left behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup: the terminal may go
                signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(out: Path, found: dict[str, Any]) -> bool:
    """compare.json, the new one whole or the one before. Returns whether it could be written."""
    path = out / "compare.json"
    new = path.with_suffix(".json.new")
    try:
        new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        _say(f"{path}: {error.strerror or error}")
        return False
    return True


def _finish(args: argparse.Namespace, found: dict[str, Any], result: Comparison) -> int:
    """Write, print; returns the exit code."""
    is_written = _write(args.out, found)
    print(json.dumps(found) if args.json else compare_text(result))
    if not is_written:
        return bench.EXIT_ERROR
    _say(f"written: {args.out / 'compare.json'}")
    if result.figures and importlib.util.find_spec("matplotlib") is not None:
        from benchmarks.compare.plot import plot  # noqa: PLC0415

        picture = args.out / "compare.svg"
        plot(found["systems"], f"{args.data.name}, {Path(args.model).name}", picture)
        _say(f"written: {picture}")
    if result.interrupted:
        return bench.EXIT_INTERRUPTED
    return bench.EXIT_FAILED if result.num_failed else bench.EXIT_OK


def compare_text(result: Comparison) -> str:
    """The table, and below it what its columns are and what was not run."""
    from benchmarks.compare.figures import table_rows  # noqa: PLC0415

    lines = []
    if result.figures:
        by = next(iter(result.figures.values())).prefill_by
        lines += [table(table_rows(result.figures)), LEGEND.format(prefill=PREFILL_BY[by])]
    for name, why in result.not_run.items():
        first, _, log = why.partition("\n")
        lines.append(f"not run: {name}: {first}" + (f" (see {name}.log)" if log else ""))
    if result.interrupted:
        lines.append("interrupted: the other systems were not run")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
