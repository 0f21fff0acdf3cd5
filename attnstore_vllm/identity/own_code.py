# SPDX-License-Identifier: Apache-2.0
"""Code that KV depends on and no version tells: of models, of plugins, and what they import.

Told by its version is the code of an installed package, but for `pip install -e`. All other code
counts by content: of a package all files, of a module its file. So does what they import, as their
text says it, and of an installed package what its metadata requires. The environment variables
that their text names count as well.

*Not seen*: a name that is put together at run time, and a file that is edited within an installed
package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from attnstore_vllm.identity.left_out import VARIABLES

logger = logging.getLogger(__name__)

TOLD_BY_VERSION = frozenset({"vllm", "torch", "transformers", "builtins", "typing", "abc"})
"""Their versions are in the namespace."""
_OF_MODELS = "transformers_modules"
"""The package that Transformers copies all models' own code into, each into a folder of its own."""
_NOT_FOLLOWED = TOLD_BY_VERSION | sys.stdlib_module_names | {_OF_MODELS, "attnstore_vllm"}
_COMPILED = (".pyc", ".pyo")
CONTENT_BYTES = 64 << 20
"""The most that is read; files beyond it, the largest, count by size and times."""
ENTRIES_MAX = 100_000
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:from[ \t]+(\w[\w.]*)[\s\\]+import\b|import[ \t]+([\w., \t]+))"
    r"|(?:import_module|__import__)\(\s*[\"'](\w[\w.]*)",
    re.MULTILINE,
)
_RELATIVE = re.compile(r"from[ \t]+(\.+)([\w.]*)[\s\\]+import[\s\\(]+([\w., \t\n]*)")
_VARIABLE = re.compile(r"(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\()\s*[\"'](\w+)")
_NO_VARIABLES = frozenset(" ".join(VARIABLES.values()).split()) | {
    "HOME", "HOSTNAME", "LOCAL_WORLD_SIZE", "LOGNAME", "MASTER_ADDR", "MASTER_PORT", "PATH", "PWD",
    "PYTHONPATH", "RANK", "TMPDIR", "USER", "WORLD_SIZE",
}  # fmt: skip
"""They say where a process is, or who it is."""
NO_CODE = blake3(b"[]").hexdigest()
"""Said by digest_of_code() where versions tell all."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW")
_REQUIRED = re.compile(r"[\w.-]+")


class _Endless(Exception):
    """A package has more files than are looked at."""


def is_told(package: importlib.metadata.Distribution) -> bool:
    """Whether the version of an installed package tells its code."""
    url = package.read_text("direct_url.json")
    try:
        is_editable = url is not None and json.loads(url).get("dir_info", {}).get("editable", False)
    except (ValueError, AttributeError):  # no such JSON: by content, which is never wrong
        return False
    return package.read_text("RECORD") is not None and not is_editable


def digest_of_code(modules: Iterable[str]) -> str:
    """Digest of the code that the modules of a model's classes are made of; of none, the same one
    always. A module that no file tells is another one in each start.

    Cost: reads all files once, CONTENT_BYTES at most; about a second for the list of installed
    packages, if there is such code at all. Raises: OSError.
    """
    code = _Code()
    for module in sorted(set(modules)):
        code.add_root(module)
    return code.digest()


def digest_of_package(top: str, *, with_imports: bool) -> str:
    """Digest of all files of a package or module that is in use. Cost, Raises: as above."""
    code = _Code()
    code.add_all(top, _places(top), with_imports=with_imports)
    return code.digest()


def digest_of_imports(top: str) -> str:
    """Digest of what a package imports whose version tells its own code; empty: nothing that
    counts. Cost, Raises: as above."""
    code = _Code()
    code.follow(top)
    return "" if code.is_empty() else code.digest()


def digest_of_directory(place: Path, but: Collection[Path]) -> str:
    """Digest of all files below a directory but these, wherever it lies. Cost, Raises: as above."""
    code = _Code()
    code.add_all("it", [place], with_imports=False)
    return code.digest(but, depth=1)


def files_below(place: Path) -> list[Path]:
    """Those that digest_of_directory() reads; of too many none, since no two digests of them are
    alike."""
    try:
        return [file for file, _ in _files_of([place])]
    except _Endless:
        return []


class _Code:
    """Files by the name that each counts by, and facts that need no file. Where a file lies does
    not count."""

    def __init__(self) -> None:
        self._files: dict[Path, str] = {}
        self._facts: set[tuple[str, str]] = set()
        self._whole: dict[str, bool] = {}
        """By top-level name: whether all its files count."""

    def add_root(self, module: str) -> None:
        """The module of a class that is in use."""
        top, name = module.partition(".")[0], module.rpartition(".")[2]
        if top in TOLD_BY_VERSION:
            return
        file = _file_of(module)
        if file is None:
            self._facts.add((name, secrets.token_hex(16)))
        elif top == _OF_MODELS:
            self._add_copied(file, name)
        elif top in sys.stdlib_module_names:
            self._files[file] = name
        elif not self._add_top(top):
            self._files[file] = name
            self.follow(top)

    def is_empty(self) -> bool:
        return not self._files and not self._facts

    def follow(self, top: str) -> None:
        """Add all that a package imports, and not the package itself."""
        self._whole[top] = self._whole.get(top, False)
        with contextlib.suppress(_Endless):
            for file, _ in _files_of(_places(top)):
                if file.suffix == ".py":
                    self._read(file)

    def add_all(self, top: str, places: Sequence[Path], *, with_imports: bool) -> None:
        """All files of these, and all that they import."""
        if not places:
            self._facts.add((top, secrets.token_hex(16)))
        try:
            for file, name in _files_of(places):
                self._add_file(file, name, with_imports)
        except _Endless:
            logger.warning(
                "AttnStore does not know the code of %s: there are more than %d files in %s. What "
                "it stores now is not found again after a restart",
                top,
                ENTRIES_MAX,
                places[0],
            )
            self._facts.add((top, secrets.token_hex(16)))

    def digest(self, but: Collection[Path] = (), depth: int = 0) -> str:
        """Reads the files, but for these. Raises OSError.

        Args:
            depth: folders of a name that do not count.
        """
        left = CONTENT_BYTES
        found = set(self._facts)
        stats = [(file, file.stat()) for file in self._files if file not in but]
        for file, stat in sorted(stats, key=lambda it: (it[0].suffix != ".py", it[1].st_size)):
            if stat.st_size <= left:
                left -= stat.st_size
                told = blake3(file.read_bytes()).hexdigest()
            else:
                told = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
            found.add((self._files[file].split("/", depth)[-1], told))
        return blake3(json.dumps(sorted(found)).encode()).hexdigest()

    def _add_top(self, top: str) -> bool:
        """Take in an imported name. Whether all its files count; else its version does, if any."""
        if top not in self._whole:
            places = _places(top)
            versions = _versions(top, places)
            self._facts.update(versions)
            self._whole[top] = bool(places) and not versions
            if self._whole[top] or (top in sys.modules and not places):
                self.add_all(top, places, with_imports=True)
            for name, _ in versions:
                self._add_required(name)
        return self._whole[top]

    def _add_file(self, file: Path, name: str, with_imports: bool) -> None:
        if file in self._files:
            return
        self._files[file] = name
        if with_imports and file.suffix == ".py":
            self._read(file)

    def _read(self, file: Path) -> None:
        """Add all that it imports, and the environment that it reads."""
        text = file.read_text("utf-8", "replace")
        for match in _IMPORT.finditer(text):
            one, several, called = match.groups()
            for part in (one or several or called).split(","):
                top = part.strip().partition(" ")[0].partition(".")[0]
                if top and top not in _NOT_FOLLOWED:
                    self._add_top(top)
        for name in _VARIABLE.findall(text):
            value = os.environ.get(name)
            if value is not None and name not in _NO_VARIABLES and not _SECRET.search(name):
                self._facts.add((f"environ {name}", value))

    def _add_required(self, package: str) -> None:
        """Add all that an installed package requires: it may be installed by `pip install -e`."""
        for line in importlib.metadata.distribution(package).requires or ():
            found = _REQUIRED.match(line)
            if found is not None and "extra ==" not in line:
                for top in _tops().get(_normal(found[0]), ()):
                    if top.isidentifier() and top not in _NOT_FOLLOWED:
                        self._add_top(top)

    def _add_copied(self, file: Path, name: str) -> None:
        """A file that Transformers has copied, and its siblings that it imports. Others may lie
        beside it, by what was copied before."""
        if file in self._files:
            return
        self._add_file(file, name, True)
        for match in _RELATIVE.finditer(file.read_text("utf-8", "replace")):
            dots, inner, names = match.groups()
            place = file.parents[len(dots) - 1].joinpath(*inner.split("."))
            inside = [place / each.split()[0] for each in names.split(",") if each.split()]
            for found in (place, *inside):
                if found.with_name(f"{found.name}.py").is_file():
                    self._add_copied(found.with_name(f"{found.name}.py"), found.name)


def _file_of(module: str) -> Path | None:
    """Nothing is imported for it."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if isinstance(file, str):
        return Path(file) if os.path.isfile(file) else None
    top, *inner = module.split(".")
    for place in _places(top):
        below = place.joinpath(*inner)
        for found in (place, below / "__init__.py", below.with_name(f"{below.name}.py")):
            if found.is_file():
                return found
    return None


def _places(top: str) -> list[Path]:
    """The file of a module, or the folders of a package. Nothing is imported for it."""
    module = sys.modules.get(top)
    file, folders = getattr(module, "__file__", None), getattr(module, "__path__", ())
    if module is None:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return []
        if spec is None or spec.origin is None:  # a folder of that name is not yet a package
            return []
        file, folders = spec.origin, spec.submodule_search_locations or ()
    found = [Path(folder) for folder in folders if os.path.isdir(folder)]
    return found or ([Path(file)] if file is not None and os.path.isfile(file) else [])


@functools.cache
def _installed() -> dict[str, list[str]]:
    return {top: list(names) for top, names in importlib.metadata.packages_distributions().items()}


@functools.cache
def _tops() -> dict[str, list[str]]:
    """By an installed package's name: what is imported of it."""
    found: dict[str, list[str]] = {}
    for top, names in _installed().items():
        for name in names:
            found.setdefault(_normal(name), []).append(top)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _versions(top: str, places: list[Path]) -> set[tuple[str, str]]:
    """Those of the installed packages that a module is from; none, if they do not tell it."""
    found = set()
    for name in _installed().get(top, ()):
        package = importlib.metadata.distribution(name)
        where = Path(str(package.locate_file(""))).resolve()
        if is_told(package) and all(place.resolve().parent == where for place in places):
            found.add((name, package.version))
    return found


def _files_of(places: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """All files but compiled copies of others, and their names below the place's parent: code may
    read any of them. Raises _Endless."""
    entries, seen = 0, set()
    for place in places:
        if place.is_file():
            yield place, place.stem
        for folder, folders, files in os.walk(place, followlinks=True):
            entries += len(folders) + len(files)
            if entries > ENTRIES_MAX:
                raise _Endless
            real = os.path.realpath(folder)
            is_new = real not in seen
            seen.add(real)
            kept = [name for name in folders if not name.startswith((".", "__pycache__"))]
            folders[:] = kept if is_new else []
            for name in files if is_new else ():
                file = Path(folder, name)
                if file.suffix not in _COMPILED and file.is_file():
                    yield file, file.relative_to(place.parent).as_posix()
