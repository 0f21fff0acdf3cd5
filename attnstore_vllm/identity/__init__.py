# SPDX-License-Identifier: Apache-2.0
"""Whose KV it is: all that bytes depend on, and its name."""
