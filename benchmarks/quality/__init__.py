# SPDX-License-Identifier: Apache-2.0
"""How good a model's answers are after truncation, if the KV of what is kept is reused.

__main__.py has the commands; model.py the model, methods.py what is done at a truncation.
"""
