# SPDX-License-Identifier: Apache-2.0
"""Parts of `python -m benchmarks.agents` that ask real servers."""
