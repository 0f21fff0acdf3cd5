# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Imported once, in the process that engines are forked from: importing vLLM takes longer than
many a test. Nothing here may start a thread or read a setting that engines differ in."""

import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker

import attnstore_vllm.connector.connector
import tests.vllm.engine
import tests.vllm.faults
