# SPDX-License-Identifier: Apache-2.0
"""Parts of benchmarks/audit_others.py."""
