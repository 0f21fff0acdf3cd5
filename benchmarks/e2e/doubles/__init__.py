# SPDX-License-Identifier: Apache-2.0
"""Connectors with a fault each; vLLM finds them by PYTHONPATH."""
