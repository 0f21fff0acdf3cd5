# SPDX-License-Identifier: Apache-2.0
"""Tests that run the real vLLM: its CPU build, with models of a few hundred kilobytes."""
