# SPDX-License-Identifier: Apache-2.0
"""The questions that CachedAttention's evaluation asked, one file each: `*.yaml`."""
