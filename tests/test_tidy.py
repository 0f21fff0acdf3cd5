# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check. Each failure names the file, the line and the rule."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attnstore_vllm"
LONG_LINES, FIRST_LINES = 400, 12
"""A file that is longer says why in its first lines."""
FUNCTION_LINES_MAX = 70
UNFINISHED = "fixme".upper()
SPDX = "SPDX-License-Identifier: Apache-2.0"

# Decisions and codecs: no clock, no I/O, no threads, no chance, no tensors.
PURE = ("policy/", "index/", "tiers/nvme/format.py", "transfer/plan.py", "transfer/geometry.py")
EFFECTS = {
    "aiofiles", "asyncio", "ctypes", "datetime", "fcntl", "io", "logging", "mmap",
    "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "shutil", "socket",
    "subprocess", "sys", "tempfile", "threading", "time", "torch", "uuid", "vllm",
}  # fmt: skip
ALLOWED_VLLM = ("connector/", "identity/", "plugin.py")
# Imports go one way; what a room is not given here, it must not know of.
LOW = {"errors", "types", "own_files", "plain_text"}
KNOWS = {
    "policy": {"types"},
    "io": {*LOW, "_native"},
    "index": {"types", "policy", "_native"},
    "config": {"errors", "types", "io", "own_files"},
    "transfer": {*LOW, "config", "preflight", "_native", "_native_cuda"},
    "tiers": {*LOW, "index", "policy", "io", "tiers/nvme"},
    "tiers/nvme": {*LOW, "config", "index", "policy", "io", "tiers"},
    "tiers/peers": {*LOW, "index", "policy", "io", "transfer", "tiers"},
    "tiers/shared": {*LOW, "config", "index", "policy", "io", "tiers"},
    "store": {*LOW, "config", "engine_facts", "index", "policy", "io", "tiers", "tiers/nvme"},
    "scheduler": {
        *LOW, "config", "engine_facts", "hint_sources", "hints", "index", "policy", "store",
        "tiers", "tiers/nvme", "transfer",
    },
    "identity": {*LOW, "config", "engine_start", "transfer"},
    "connector": {
        *LOW, "config", "engine_facts", "hints", "identity", "index", "io", "parent_watch",
        "plugin", "policy", "preflight", "scheduler", "store", "tiers", "tiers/nvme", "tiers/peers",
        "tiers/shared", "transfer",
    },
    "cli": {
        *LOW, "_native", "config", "index", "io", "model_shape", "plugin", "preflight",
        "prometheus", "tiers/nvme", "tiers/shared", "transfer",
    },
}  # fmt: skip
"""Rooms of the package, each with itself and these."""
# The outermost frame of a thread of ours, where a bug of ours stops a tier and not the server; and
# an executor, which hands every exception to its caller; and a trial of the model's own code.
NAMES_VARIABLES = {"identity/own_code.py"}
"""Foreign code reads them: they are facts of its KV, and no settings."""
TELLS_CHILDREN = ("engine_start.py",)
"""May leave a word for the processes that it makes in the environment. It is no setting."""
MAY_CATCH_ALL = {
    "store/announcer.py": 1,
    "tiers/peers/peers_io.py": 1,  # the outermost frame of its thread
    "tiers/peers/owner.py": 1,  # the same
    "store/thread.py": 1,
    "io/daemon_pool.py": 1,
    "connector/connector.py": 1,
    "connector/page_contents.py": 1,  # as rope_trial.py: a model's code must end no start
    "connector/rope_trial.py": 1,
    "scheduler/observed.py": 1,
}
MOCKS = {"Mock", "MagicMock", "AsyncMock", "NonCallableMock", "create_autospec"}
SKIPPED = {".venv", ".git", "build", "node_modules"}


def python_files(*folders: Path) -> list[Path]:
    found = [file for folder in folders for file in folder.rglob("*.py")]
    return sorted(file for file in found if not SKIPPED & set(file.relative_to(ROOT).parts))


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of each import in a file, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            assert node.module is not None
            yield node.lineno, node.module


LAB = ROOT / "attnstore_lab"
ALL = python_files(PACKAGE, LAB, ROOT / "tests", ROOT / "tools", ROOT / "benchmarks")
OURS = python_files(PACKAGE)
NATIVE = sorted((ROOT / "csrc").rglob("*.*"))


def test_there_is_something_to_check() -> None:
    assert len(OURS) > 20
    assert NATIVE


@pytest.mark.parametrize("path", [*ALL, *NATIVE, ROOT / "setup.py"], ids=short)
def test_licence(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert SPDX in text.partition("\n")[0], f"{short(path)}:1: begin with {SPDX}"
    assert UNFINISHED not in text, f"{short(path)}: something is left to be fixed"


@pytest.mark.parametrize("path", [*ALL, *NATIVE], ids=short)
def test_long_files_say_why(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    is_told = any("It is long since" in line for line in lines[:FIRST_LINES])
    assert is_told or len(lines) <= LONG_LINES, f"{short(path)}: {len(lines)} lines, and no reason"


NO_SUBJECT = re.compile(r"\b(nobody|somebody|anybody|everybody|whoever|whatever)\b", re.IGNORECASE)


def test_sentences_say_who() -> None:
    """In the package and the laboratory; tests/test_readme.py looks at the pages."""
    found = [
        f"{short(path)}:{number}: {line.strip()}"
        for path in python_files(PACKAGE, LAB)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NO_SUBJECT.search(line)
    ]
    assert not found, "name the subject:\n" + "\n".join(found)


@pytest.mark.parametrize("path", ALL, ids=short)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            where = f"{short(path)}:{node.lineno}: {node.name}"
            assert lines <= FUNCTION_LINES_MAX, f"{where} has {lines} lines"


def room_of(name: str) -> str:
    """Of a file or module by its path in the package: its folder, or a file's own name."""
    first, _, rest = name.partition("/")
    second = rest.partition("/")[0]
    within = first == "tiers" and second in {"nvme", "peers", "shared"}
    return f"{first}/{second}" if within else first


def test_there_is_a_rule_for_each_room() -> None:
    rooms = {room_of(path.relative_to(PACKAGE).as_posix()) for path in OURS}
    assert {room for room in rooms if not room.endswith(".py")} == KNOWS.keys()


@pytest.mark.parametrize("path", OURS, ids=short)
def test_imports_go_one_way(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    knows = KNOWS.get(room_of(name))
    for line, module in imports(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{short(path)}:{line}"
        top, _, rest = module.partition(".")
        if name.startswith(PURE):
            assert top not in EFFECTS, f"{where}: pure code imports {module}"
        if not name.startswith(ALLOWED_VLLM):
            assert top != "vllm", f"{where}: only {ALLOWED_VLLM} may import vllm"
        assert top != "attnstore_lab", f"{where}: the package does not know the laboratory"
        if top != "attnstore_vllm":
            continue
        if not rest:
            continue
        inside = room_of(rest.replace(".", "/"))
        if knows is not None:
            is_own = inside == room_of(name)
            assert is_own or inside in knows, f"{where}: {room_of(name)}/ must not know {module}"
        else:
            assert inside != "connector", f"{where}: only the border knows the connector"


@pytest.mark.parametrize("path", OURS, ids=short)
def test_one_heap_forgets_what_has_left(path: Path) -> None:
    """Of heaps made by hand, one grew with each renewal of a lease. Those of simulators and test
    doubles hold what is to come, and nothing in them changes."""
    if path.relative_to(PACKAGE).as_posix() == "policy/lazy_heap.py":
        return
    for line, module in imports(ast.parse(path.read_text(encoding="utf-8"))):
        assert module != "heapq", f"{short(path)}:{line}: use policy/lazy_heap.py: LazyHeap"


@pytest.mark.parametrize("path", OURS, ids=short)
def test_no_hidden_settings_and_no_swallowed_errors(path: Path) -> None:
    text, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
    environ = () if name in TELLS_CHILDREN else ("os.environ",)
    environ = () if name in NAMES_VARIABLES else (*environ, "getenv")
    for banned in (*environ, "except:", "type: ignore\n", "assert ("):
        assert banned not in text, f"{short(path)}: {banned.strip()} is not for this package"
    caught = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name):
            caught += node.type.id in ("Exception", "BaseException")
    allowed = MAY_CATCH_ALL.get(name, 0)
    assert caught <= allowed, f"{short(path)}: catches every exception, and hides our own bugs"


@pytest.mark.parametrize("path", [p for p in OURS if p.name == "__init__.py"], ids=short)
def test_packages_begin_empty(path: Path) -> None:
    """An __init__ has a docstring, imports and __all__: importing a package has no effect."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_export = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__")
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        assert is_text or is_export or is_import, f"{short(path)}:{node.lineno}: move it out"


@pytest.mark.parametrize("path", [p for p in OURS if p.name != "__init__.py"], ids=short)
def test_modules_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{short(path)}:2"


@pytest.mark.parametrize("path", python_files(ROOT / "tests"), ids=short)
def test_tests_use_the_real_thing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            where = f"{short(path)}:{node.lineno}"
            assert called not in MOCKS, f"{where}: {called} agrees with anything; use a test double"


PRIVATE = re.compile(r"(?:self\.|def )(_[a-z]\w*)\b")
PRIVATE_MAX = 60
"""Times that tests look behind what the package says. More would hold it as it is."""


def test_tests_reach_few_private_members() -> None:
    ours = {name for path in OURS for name in PRIVATE.findall(path.read_text(encoding="utf-8"))}
    reached = []
    for path in python_files(ROOT / "tests"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or node.attr not in ours:
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                reached.append(f"{short(path)}:{node.lineno}: {node.attr}")
    assert len(reached) <= PRIVATE_MAX, "\n".join(reached)


def imported_when_loaded(tree: ast.Module) -> set[str]:
    """Modules, and names that may be modules, that a module needs to be loaded."""
    found: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


def test_no_imports_in_a_circle() -> None:
    trees = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"):
        imported_when_loaded(ast.parse(path.read_text(encoding="utf-8")))
        for path in OURS
    }  # fmt: skip
    needs = {
        name: {n for n in found & trees.keys() if not name.startswith(f"{n}.")}
        for name, found in trees.items()
    }
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError as error:
        raise AssertionError(f"imported in a circle: {error.args[1]}") from error


@pytest.mark.parametrize("path", OURS, ids=short)
def test_docstrings_begin_with_what_the_thing_is(path: Path) -> None:
    """Those of constants and fields too, which are strings behind them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first = str(node.value.value).split(maxsplit=1)[:1]
            assert first not in (["Of"], ["What"]), f"{short(path)}:{node.lineno}"


def test_no_two_files_have_one_name() -> None:
    """Of the package and of csrc: who looks for a file finds one."""
    names = Counter(path.name for path in [*OURS, *NATIVE] if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_have_one_name() -> None:
    where: dict[str, list[str]] = {}
    for path in OURS:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(short(path))
    twice = {name: files for name, files in where.items() if len(files) > 1}
    assert twice == {}


# vLLM, or its metrics, call what these files define.
CALLED_BY_VLLM = ("connector/connector.py", "connector/prefetch_route.py", "connector/metrics.py")
FOR_TESTS = {
    "check_quiet": "asserts what always holds, of all that the scheduler's side has",
    "is_quiet": "whether routers were told of all; it takes the announcer's lock",
    "command_names": "the commands that pages may name",
    "returns": "what the estimator has learned of one kind",
}


def test_what_tests_alone_use_is_theirs() -> None:
    """Else it is kept alive by its own test."""
    used: set[str] = set()
    for path in python_files(PACKAGE, LAB, ROOT / "benchmarks", ROOT / "tools"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"(?:[\w.]+:)?\w+", node.value):  # getattr(), and MODULE:CLASS
                    used.add(node.value.rpartition(":")[2])
    unused = set()
    for path in OURS:
        if short(path).endswith(CALLED_BY_VLLM):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                is_special = node.name.startswith("__")
                unused |= set() if is_special or node.name in used else {node.name}
    assert unused == FOR_TESTS.keys()
