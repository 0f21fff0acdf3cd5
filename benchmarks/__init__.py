# SPDX-License-Identifier: Apache-2.0
"""Benchmarks and the demo: real servers, real conversations."""
