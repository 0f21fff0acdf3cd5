# SPDX-License-Identifier: Apache-2.0
"""`attnstore bench compare`: the same load on one server after the other."""
