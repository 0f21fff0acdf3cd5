# SPDX-License-Identifier: Apache-2.0
# make setup | demo | test | check | lint-files | package | wheels | sanitize | docs | docs-serve
# make bench | gpu-check | gpu-e2e
PYTHON := .venv/bin/python
# Tests run in so many processes, each file in one. Those of vLLM come behind the others: vLLM sets
# variables and loggers of the process that imports it.
WORKERS ?= 2
PYTEST := $(PYTHON) -m pytest -n $(WORKERS) --dist loadfile
# What `make test` runs of tests/vllm: vLLM's scheduler with scripted models, and one real engine.
CORE := aborts async_stops bytes client_names copy_races leaks lora media media_content namespace \
  requests rests save_races streaming truncation weight_names
CXX_FILES := $(foreach end,cpp cu h,$(wildcard csrc/*/*.$(end)))
# The one that has PyTorch for CUDA and this package; .venv has PyTorch for the CPU.
GPU_PYTHON ?= python3

.PHONY: setup demo test check lint lint-files format package wheels sanitize docs docs-serve bench
.PHONY: gpu-check gpu-e2e clean

setup:
	@python3 tools/setup_env.py

demo: setup
	@$(PYTHON) -m benchmarks.demo $(ARGS)

test: setup
ifdef ARGS
	@$(PYTHON) -m pytest $(ARGS)
else
	@$(PYTEST) tests --ignore=tests/vllm
	@$(PYTEST) $(CORE:%=tests/vllm/test_%.py)
endif

check: lint
	@$(PYTEST) tests --ignore=tests/vllm; first=$$?; $(PYTEST) tests/vllm && exit $$first

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/clang-format --dry-run --Werror $(CXX_FILES)

lint-files:
	@python3 tools/lint_files.py

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .
	@.venv/bin/clang-format -i $(CXX_FILES)

package:
	@python3 tools/check_package.py $(ARGS)

wheels:
	@python3 tools/make_wheels.py $(ARGS)

sanitize:
	@tools/sanitize.sh

docs:
	@python3 tools/docs_site.py

docs-serve:
	@python3 tools/docs_site.py --serve

bench: setup
	@$(PYTHON) -m benchmarks.hit_latency $(ARGS)

gpu-check:
	@$(GPU_PYTHON) tools/run_installed.py benchmarks.gpu_check $(ARGS)

gpu-e2e:
	@$(GPU_PYTHON) tools/run_installed.py benchmarks.gpu_e2e $(ARGS)

clean:
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache *.egg-info attnstore_vllm/_*.so
