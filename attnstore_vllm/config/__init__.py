# SPDX-License-Identifier: Apache-2.0
"""The settings of a store: their values, their bounds, their texts."""
