# SPDX-License-Identifier: Apache-2.0
"""Engines of one host that read each other's pools (docs/design.md, Peers)."""
