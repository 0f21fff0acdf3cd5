# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of one part alone, without a model."""
