# SPDX-License-Identifier: Apache-2.0
"""What benchmarks.gpu_check measures. Needs PyTorch, a GPU and this package; no vLLM."""
