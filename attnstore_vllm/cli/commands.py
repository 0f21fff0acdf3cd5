# SPDX-License-Identifier: Apache-2.0
"""Commands of `attnstore`: settings and machine, the directory of nvme.path, live figures.

Others are added by packages that name themselves in the entry point group attnstore.commands: the
laboratory (attnstore_lab/cli/commands.py) is one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from attnstore_vllm.cli import (
    audit_prompt,
    doctor,
    gc,
    init,
    inspect,
    settings_file,
    shared_gc,
    top,
    verify,
)
from attnstore_vllm.cli.main import EXIT_BAD, EXIT_ERROR, EXIT_OK
from attnstore_vllm.config.tenants import read_salt
from attnstore_vllm.config.values import SIZE_MIN, parse_size, seconds_of
from attnstore_vllm.errors import ConfigError

DESCRIPTION = (
    "The attnstore command: settings and machine, the directory of nvme.path, simulation, load."
)
DEFAULT_DIRECTORY = Path("/var/tmp/attnstore")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="attnstore", description=DESCRIPTION)
    made.add_argument("--version", action="version", version=_version())
    commands = made.add_subparsers(dest="command", required=True)
    _add_settings_commands(commands)
    read = commands.add_parser(
        "verify", help="read every record; exit 1 if any is bad (safe beside a running server)"
    )
    look = commands.add_parser(
        "inspect", help="namespaces, chunks, tokens, bytes, ages (safe beside a running server)"
    )
    clean = commands.add_parser(
        "gc", help="delete stored KV; says what would go (with --yes, and the server stopped, does)"
    )
    for command in (read, look, clean):
        command.add_argument(
            "directory", type=Path, metavar="DIR", nargs="?" if command is clean else None,
            help="the server's nvme.path",
        )  # fmt: skip
        command.add_argument("--json", action="store_true", help="print JSON")
    clean.add_argument(
        "--shared", type=Path, metavar="FILE",
        help="instead of DIR: settings with `shared`; a tenant's KV in that store goes",
    )  # fmt: skip
    clean.add_argument("--older-than", metavar="AGE", help="written longer ago, as in 7d or 12h")
    clean.add_argument("--namespace", metavar="HEX", help="of one namespace, as inspect shows it")
    whose = clean.add_mutually_exclusive_group()
    whose.add_argument(
        "--tenant-file", type=Path, metavar="FILE",
        help="of one cache_salt, which this file has; its owner alone may read it",
    )  # fmt: skip
    whose.add_argument(
        "--tenant", metavar="SALT", help="of this cache_salt; other users of the machine see it"
    )
    clean.add_argument("--to-size", metavar="SIZE", help="oldest first until no more is taken")
    clean.add_argument("--yes", action="store_true", help="delete what all of these rules name")
    read.set_defaults(handler=_verify)
    look.set_defaults(handler=_inspect)
    clean.set_defaults(handler=_gc)
    compare = commands.add_parser(
        "audit", help="have one prompt's stored KV compared by a server; exit 1 if it differs"
    )
    compare.add_argument("url", metavar="URL", help="of a vLLM server, as localhost:8000")
    compare.add_argument("--api-key", metavar="KEY", help="that the server asks for")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(handler=_audit)
    live = commands.add_parser("top", help="live view of servers by their /metrics")
    live.add_argument("url", nargs="+", metavar="URL", help="of a vLLM server, as localhost:8000")
    live.add_argument("--once", action="store_true", help="print figures since the start, and end")
    live.add_argument("--json", action="store_true", help="print JSON, a line for each look")
    live.add_argument(
        "--interval", metavar="TIME", default="2s", help="between looks (%(default)s)"
    )
    live.set_defaults(handler=_top)
    for added in entry_points(group="attnstore.commands"):
        added.load()(commands)
    return made


def _add_settings_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    begin = commands.add_parser(
        "init", help="print a commented YAML of settings, sized for this machine"
    )
    begin.add_argument(
        "--dir", type=Path, default=DEFAULT_DIRECTORY, help="nvme.path (%(default)s)"
    )
    begin.add_argument("--dram", metavar="SIZE", help="as in 64GiB (half of what is free)")
    begin.add_argument("--nvme", metavar="SIZE", help="as in 2TiB (half of what is free)")
    begin.add_argument(
        "--all", action="store_true", help="every setting, not only those that people change"
    )
    check = commands.add_parser(
        "check", help="say all that is wrong with a file of settings; exit 1 if anything is"
    )
    check.add_argument("file", type=Path, metavar="FILE", help="attnstore.yaml, or JSON")
    examine = commands.add_parser(
        "doctor", help="say what a start here would refuse or warn about; exit 1 if it would refuse"
    )
    examine.add_argument("file", type=Path, nargs="?", metavar="YAML", help="the settings")
    examine.add_argument("--model", type=Path, metavar="DIR", help="sizes in tokens of this model")
    for command in (check, examine):
        command.add_argument("--json", action="store_true", help="print JSON")
    begin.set_defaults(handler=_init)
    check.set_defaults(handler=_check)
    examine.set_defaults(handler=_doctor)


def _version() -> str:
    parts = [f"Python {platform.python_version()}"]
    try:
        parts.append(f"vLLM {importlib.metadata.version('vllm')}")
    except importlib.metadata.PackageNotFoundError:
        parts.append("no vLLM")
    try:
        own = importlib.metadata.version("attnstore-vllm")
    except importlib.metadata.PackageNotFoundError:
        own = "(not installed)"
    return f"attnstore {own}, {', '.join(parts)}"


def command_names() -> set[str]:
    """The commands that there are."""
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return set(commands.choices)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code. Raises: AttnStoreError, OSError."""
    handler: Callable[[argparse.Namespace], int] = args.handler
    return handler(args)


def _verify(args: argparse.Namespace) -> int:
    verdict = verify.verify(args.directory, quiet=args.json)
    if args.json:
        print(json.dumps(verify.as_json(verdict)))
    else:
        verify.show(verdict)
    return EXIT_BAD if verdict.bad else EXIT_OK


def _inspect(args: argparse.Namespace) -> int:
    namespaces = inspect.inspect(args.directory)
    nodes = inspect.inspect_nodes(args.directory)
    if args.json:
        print(json.dumps([*inspect.as_json(namespaces), *nodes]))
    else:
        if not namespaces and not any(node["records"] for node in nodes):
            print("nothing is stored")
        inspect.show(namespaces)
        inspect.show_nodes(nodes)
        inspect.show_audits(args.directory)
    return EXIT_OK


def _init(args: argparse.Namespace) -> int:
    print(init.settings_for(args.dir, args.dram, args.nvme, every=args.all), end="")
    return EXIT_OK


def _check(args: argparse.Namespace) -> int:
    settings = settings_file.read_settings(args.file)
    problems = settings.problems()
    for hint in settings.hints():
        print(f"{args.file}: {hint}", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps([problem.as_json() for problem in problems]))
    elif problems:
        for problem in problems:
            print(f"{args.file}: {problem}")
    else:
        then = f"attnstore doctor {shlex.quote(str(args.file))}"
        print(f"{args.file}: the settings fit together; `{then}` looks at this machine")
    return EXIT_BAD if problems else EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    checks = list(doctor.examine(args.file, args.model))
    if args.json:
        print(json.dumps(doctor.as_json(checks)))
    else:
        doctor.show(checks)
    return EXIT_BAD if doctor.is_bad(checks) else EXIT_OK


def _top(args: argparse.Namespace) -> int:
    interval_s = seconds_of(args.interval)
    if not interval_s:
        raise ConfigError(f"--interval is {args.interval!r}; expected a time, as 2s")
    top.run(args.url, interval_s, once=args.once, as_json=args.json)
    return EXIT_OK


def _audit(args: argparse.Namespace) -> int:
    verdict = audit_prompt.audit(args.url, args.api_key)
    print(json.dumps(verdict.as_json()) if args.json else verdict.said)
    return EXIT_BAD if verdict.is_bad else EXIT_OK


def _gc(args: argparse.Namespace) -> int:
    size = args.to_size
    # A unit may be forgotten here too: all would go.
    least = SIZE_MIN if size is not None and size.strip().isdecimal() else 1
    salt = None if args.tenant_file is None else read_salt(args.tenant_file, "--tenant-file")
    rules = gc.Rules(
        older_than_s=None if args.older_than is None else gc.parse_age(args.older_than),
        namespace=args.namespace,
        tenant=args.tenant if salt is None else salt,
        to_size=None if size is None else parse_size("--to-size", size, least),
    )
    if rules == gc.Rules():
        print(
            "attnstore gc: say what is to go: --older-than, --namespace, --tenant-file or "
            "--tenant, --to-size",
            file=sys.stderr,
        )
        return EXIT_ERROR
    if args.shared is not None:
        return _gc_shared(args, rules)
    if args.directory is None:
        raise ConfigError("expected DIR, a server's nvme.path, or --shared FILE; found neither")
    report = gc.collect(args.directory, rules, is_dry=not args.yes)
    for words in report.nodes:
        print(words, file=sys.stderr)
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        gc.show(report)
    return EXIT_OK


def _gc_shared(args: argparse.Namespace, rules: gc.Rules) -> int:
    if args.directory is not None or rules.tenant is None or rules != gc.Rules(tenant=rules.tenant):
        raise ConfigError(
            "with --shared FILE there is one rule, --tenant-file or --tenant, and no DIR: names in "
            "that store say neither age, size nor model"
        )
    report = shared_gc.delete(args.shared, rules.tenant, is_dry=not args.yes)
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        shared_gc.show(report)
    return EXIT_BAD if report.left else EXIT_OK
