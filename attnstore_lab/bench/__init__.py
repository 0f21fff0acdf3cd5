# SPDX-License-Identifier: Apache-2.0
"""The load generator: conversations held with any server that speaks the OpenAI API."""
