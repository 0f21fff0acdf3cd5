# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmarks/overlap.py. Each has measure(), which gives its figures, and lines()."""
