# SPDX-License-Identifier: Apache-2.0
"""Replay of request traces over the store's policies, in simulated time."""
