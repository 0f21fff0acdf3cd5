# SPDX-License-Identifier: Apache-2.0
"""The connector, or one sentence on why this vLLM cannot have it."""

from attnstore_vllm.preflight import wrong_vllm

try:
    from attnstore_vllm.connector.connector import AttnStoreConnector
except ImportError as error:
    raise wrong_vllm(error) from error

__all__ = ["AttnStoreConnector"]
