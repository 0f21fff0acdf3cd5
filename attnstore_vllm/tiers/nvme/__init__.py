# SPDX-License-Identifier: Apache-2.0
"""KV in files on NVMe."""
