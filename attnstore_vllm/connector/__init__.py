# SPDX-License-Identifier: Apache-2.0
"""The border to vLLM: the only package, with plugin.py, that imports it.

`kv_connector_module_path: attnstore_vllm.connector` finds the class here, without the plugin.
"""

from attnstore_vllm.connector.loading import AttnStoreConnector

__all__ = ["AttnStoreConnector"]
