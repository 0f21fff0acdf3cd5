# SPDX-License-Identifier: Apache-2.0
"""Parts of benchmarks/gpu_e2e.py: cases, servers, answers, speeds."""
