# SPDX-License-Identifier: Apache-2.0
"""Where KV is kept: DRAM, and a folder for each tier behind it."""
