# SPDX-License-Identifier: Apache-2.0
"""The laboratory beside the package: simulator, replay client, test doubles, their commands."""
