# SPDX-License-Identifier: Apache-2.0
# make setup | demo | test | check | sanitize | bench
PYTHON := .venv/bin/python
CXX_FILES := $(wildcard csrc/*.cpp csrc/*.h csrc/tests/*.cpp csrc/tests/*.h)

.PHONY: setup demo test check lint format sanitize bench clean

setup:
	@python3 tools/setup_env.py

demo: setup
	@$(PYTHON) -m benchmarks.demo $(ARGS)

test: setup
	@$(PYTHON) -m pytest $(ARGS)

check: lint test

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .
	@.venv/bin/clang-format -i $(CXX_FILES)

sanitize:
	@tools/sanitize.sh

bench: setup
	@$(PYTHON) -m benchmarks.hit_latency $(ARGS)

clean:
	rm -rf build .cache .pytest_cache .mypy_cache .ruff_cache *.egg-info attnstore_vllm/_native*.so
