# SPDX-License-Identifier: Apache-2.0
"""Test doubles and tiny models, shipped so that users can test their own set-ups too."""
