# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compare`: the same load on one server after the other."""
