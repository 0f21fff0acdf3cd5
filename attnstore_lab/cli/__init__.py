# SPDX-License-Identifier: Apache-2.0
"""Commands of `attnstore` that the laboratory adds."""
