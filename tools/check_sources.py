# SPDX-License-Identifier: Apache-2.0
"""Holds a vLLM's Python sources against what the store needs of it, without running it.

    python3 tools/check_sources.py 0.33.0            (downloads its wheel; keeps the .py files)
    python3 tools/check_sources.py DIR               (a folder that has vllm/)

Looked at are every name that the package imports from vLLM, names that it goes by without importing
them (GONE_BY), the members of vLLM's objects that the scheduler's side reads (MEMBERS), every field
of its KV cache specs, which the store has to know, and every hook of vLLM's connector base: those
that AttnStoreConnector has must take what vLLM gives them.
New hooks that it does not have are named. Exit 1 if something is missing. For a version that cannot
be installed here: a CUDA build, say. Standard library only. What is found goes into
results/versions.json and, with the other rows, into the table of docs/compatibility.md.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import try_version  # noqa: E402

PACKAGE = ROOT / "attnstore_vllm"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
KNOWN = ROOT / "tools" / "known_hooks.txt"
"""Hooks of the tested version, a line each with its parameters."""
_ATTENTION = "vllm/model_executor/layers/attention/attention.py"
_BLOCK_POOL = "vllm/v1/core/block_pool.py"
_ROPE = "vllm/model_executor/layers/rotary_embedding/base.py"
SPECS = "vllm/v1/kv_cache_interface.py"
GONE_BY = (
    ("scheduler/vllm_types.py", "vllm/v1/request.py", "_block_hasher"),
    ("scheduler/hidden_blocks.py", "vllm/v1/request.py", "_block_hasher"),
    ("scheduler/request.py", "vllm/v1/utils.py", "_x"),
    ("plugin.py", "vllm/distributed/kv_transfer/kv_connector/factory.py", "_registry"),
    ("identity/live_facts.py", _ATTENTION, "_k_scale"),
    ("identity/live_facts.py", _ATTENTION, "_v_scale"),
    ("identity/live_facts.py", _ATTENTION, "_q_scale"),
    ("connector/model_rotation.py", _ROPE, "_compute_inv_freq"),
    ("connector/compat.py", "vllm/v1/engine/core.py", "_reset_caches"),
    ("scheduler/reset_watch.py", _BLOCK_POOL, "cached_block_hash_to_block"),
    ("connector/kv_events.py", _BLOCK_POOL, "cached_block_hash_to_block"),
    ("scheduler/untaken.py", _BLOCK_POOL, "get_num_free_blocks"),
    ("scheduler/truncation.py", _BLOCK_POOL, "hash_block_size"),
    ("connector/specs.py", SPECS, "host_resident"),
    ("connector/specs.py", SPECS, "role"),
    ("connector/specs.py", SPECS, "enable_kv_transfer"),
    ("connector/specs.py", SPECS, "has_layer_views"),
    ("connector/specs.py", SPECS, "prefix_cacheable"),
    ("connector/specs.py", SPECS, "prefix_replay_tokens"),
    ("connector/specs.py", SPECS, "tokens_per_state"),
    ("connector/specs.py", SPECS, "rswa_window"),
    ("connector/specs.py", SPECS, "non_causal"),
    ("scheduler/saving.py", "vllm/v1/request.py", "shared_prefix_boundary"),
)
"""(our file, vLLM's file, the name there that ours goes by without importing it). Settings are not
here: those that leave the namespace are in identity/left_out.py, and another one is in it again."""
TYPES = PACKAGE / "scheduler" / "vllm_types.py"
_OUTPUT = "vllm/v1/core/sched/output.py"
MEMBERS = (
    ("Request", "vllm/v1/request.py", "Request"),
    ("LoRARequest", "vllm/lora/request.py", "LoRARequest"),
    ("NewRequest", _OUTPUT, "NewRequestData"),
    ("CachedRequests", _OUTPUT, "CachedRequestData"),
    ("SchedulerOutput", _OUTPUT, "SchedulerOutput"),
    ("KVCacheManager", "vllm/v1/core/kv_cache_manager.py", "KVCacheManager"),
)
"""(a protocol of TYPES, vLLM's file, its class there)."""


def download(version: str) -> Path:
    """The folder with that version's Python sources. Cost: its wheel at first, some 350 MB."""
    to = ROOT / ".cache" / f"vllm-source-{version}"
    if not to.is_dir():
        with tempfile.TemporaryDirectory() as name:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", name]
            subprocess.run([*pip, f"vllm=={version}"], check=True)
            (wheel,) = Path(name).glob("*.whl")
            with zipfile.ZipFile(wheel) as files:
                files.extractall(to, [n for n in files.namelist() if n.endswith(".py")])
    return to


@functools.cache
def names_of(text: str) -> frozenset[str]:
    """Everything that a module binds, also in `if` and `try`."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # a module that imports late keeps its names in a table
    return frozenset(found)


def imported() -> Iterator[tuple[str, str, str]]:
    """(our file, module, name) of what the package imports from vLLM, wherever it is."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "compat.py":  # knows what some versions lack
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    yield path.relative_to(ROOT).as_posix(), str(node.module), alias.name


def missing_names(sources: Path) -> list[str]:
    problems = []
    for where, module, name in imported():
        base = sources / module.replace(".", "/")
        files = [p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()]
        if not files:
            problems.append(f"{where}: there is no {module}")
        elif name not in names_of(files[0].read_text(encoding="utf-8")):
            is_module = (base / f"{name}.py").is_file() or (base / name).is_dir()
            if not is_module:
                problems.append(f"{where}: {module} has no {name}")
    return problems


def missing_gone_by(sources: Path) -> list[str]:
    """Those of GONE_BY that vLLM has no more, and those that our file goes by no more."""
    problems = []
    for where, module, name in GONE_BY:
        path, word = sources / module, re.compile(rf"\b{name}\b")
        if not path.is_file() or not word.search(path.read_text(encoding="utf-8")):
            problems.append(f"{where}: {module} has no {name}")
        if not word.search((PACKAGE / where).read_text(encoding="utf-8")):
            problems.append(f"{where} does not go by {name}: take it out of GONE_BY")
    return problems


def methods(path: Path, name: str) -> dict[str, ast.arguments]:
    """The methods of a class, by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (made,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.name: n.args for n in made.body if isinstance(n, ast.FunctionDef)}


def class_of(path: Path, name: str) -> ast.ClassDef | None:
    """A class of a file, by its name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return found[0] if found else None


def members(made: ast.ClassDef) -> set[str]:
    """What a class says that it has: fields, methods, and what a method assigns to self."""
    found: set[str] = set()
    for node in ast.walk(made):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    fields = (n.target for n in made.body if isinstance(n, ast.AnnAssign))
    return found | {target.id for target in fields if isinstance(target, ast.Name)}


def read_members() -> Iterator[tuple[str, str, str]]:
    """(vLLM's file, class, member) of what the scheduler's side reads."""
    for ours, module, theirs in MEMBERS:
        made = class_of(TYPES, ours)
        assert made is not None, ours
        for name in sorted(members(made)):
            yield module, theirs, name


def missing_members(sources: Path) -> list[str]:
    problems = []
    for module, theirs, name in read_members():
        made = class_of(sources / module, theirs) if (sources / module).is_file() else None
        if made is None:
            problems.append(f"scheduler/vllm_types.py: {module} has no {theirs}")
        elif name not in members(made):
            problems.append(f"scheduler/vllm_types.py: {theirs} of {module} has no {name}")
    return sorted(set(problems))


def known_fields(name: str) -> frozenset[str]:
    """A table of names in connector/specs.py, read without importing vLLM."""
    text = (PACKAGE / "connector" / "specs.py").read_text(encoding="utf-8")
    (value,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    words = (node.value for node in ast.walk(value) if isinstance(node, ast.Constant))
    return frozenset(word for word in words if isinstance(word, str))


def unknown_fields(sources: Path) -> list[str]:
    """Fields of vLLM's specs and groups that would make the store idle where they are set.

    HiSparse's specs are left out: they are idle as a whole, since they have no views by layer.
    """
    known, problems = known_fields("FIELDS"), []
    for made in ast.parse((sources / SPECS).read_text(encoding="utf-8")).body:
        if not (isinstance(made, ast.ClassDef) and made.name.endswith("Spec")):
            continue
        is_group = made.name == "KVCacheGroupSpec"
        if made.name != "KVCacheSpec" and "has_layer_views" in members(made):
            continue
        fields = (n.target for n in made.body if isinstance(n, ast.AnnAssign))
        names = {target.id for target in fields if isinstance(target, ast.Name)}
        for name in sorted(names - (known_fields("GROUP_FIELDS") if is_group else known)):
            problems.append(
                f"connector/specs.py: {made.name} has the field {name}, not known there"
            )
    return problems


def num_names() -> int:
    """How many names are looked at: each once, however many files of ours have it."""
    imports = {(module, name) for _, module, name in imported()}
    return len(imports | {(module, name) for _, module, name in GONE_BY} | set(read_members()))


def takes(args: ast.arguments) -> list[str]:
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def accepts(ours: ast.arguments, theirs: ast.arguments) -> bool:
    """Whether who calls the hook as vLLM's base has it can call ours."""
    given, wanted = takes(ours), takes(theirs)
    if ours.vararg or ours.kwarg:
        return True
    return given[: len(wanted)] == wanted and len(given) <= len(wanted) + len(ours.defaults)


def hooks(sources: Path) -> dict[str, ast.arguments]:
    found = methods(sources / BASE, "KVConnectorBase_V1")
    return {name: args for name, args in found.items() if not name.startswith("_")}


def needed_hooks() -> set[str]:
    """Hooks that the store cannot do without: connector/support.py, read without importing vLLM."""
    text = (PACKAGE / "connector" / "support.py").read_text(encoding="utf-8")
    (value,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEEDED_HOOKS"
    )
    return set(ast.literal_eval(value))


def check(sources: Path) -> tuple[list[str], list[str]]:
    """(what is missing, what is new)."""
    problems = [*missing_names(sources), *missing_gone_by(sources), *missing_members(sources)]
    problems += unknown_fields(sources)
    theirs = hooks(sources)
    ours = methods(PACKAGE / "connector" / "connector.py", "AttnStoreConnector")
    known = {line.split("(")[0]: line for line in KNOWN.read_text(encoding="utf-8").splitlines()}
    for name in sorted(ours.keys() & (known.keys() | theirs.keys())):
        if name not in theirs and name in needed_hooks():
            problems.append(f"the hook {name} is gone")
        elif name not in theirs:
            continue  # vLLM does not ask
        elif not accepts(ours[name], theirs[name]):
            problems.append(f"the hook {name} takes {takes(theirs[name])} now")
    told = known.keys() | ours.keys()
    new = [line(name, args) for name, args in theirs.items() if name not in told]
    return problems, new


def line(name: str, args: ast.arguments) -> str:
    return f"{name}({', '.join(takes(args))})"


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    given = Path(sys.argv[1])
    sources = given if (given / "vllm").is_dir() else download(sys.argv[1])
    problems, new = check(sources)
    for problem in problems:
        print(f"missing: {problem}")
    for hook in new:
        print(f"new: {hook}")
    print(
        f"{sys.argv[1]}: {num_names()} names, {len(hooks(sources))} hooks looked at, "
        f"{len(problems)} missing, {len(new)} new"
    )
    if sources != given and not problems:
        seen = {"names": num_names(), "hooks": len(hooks(sources))}
        try_version.keep(sys.argv[1], seen, is_more=True)
        try_version.write_table()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
