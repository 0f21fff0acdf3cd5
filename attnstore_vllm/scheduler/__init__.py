# SPDX-License-Identifier: Apache-2.0
"""One request's way through the store, as vLLM's scheduler asks for it. Knows neither vLLM nor
torch when it runs: connector/ brings it vLLM's own objects, and time."""
