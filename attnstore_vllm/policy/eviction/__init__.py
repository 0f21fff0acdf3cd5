# SPDX-License-Identifier: Apache-2.0
"""Which chunk leaves a tier when it is full. Pure: events in, decisions out; time is given.

rules.py has every decision of who leaves a full tier. Below it, departures.py knows whose each slot
is, and asks an order (base.py) which of the owners gives one up: by_return.py is what servers use,
lru.py is there to compare with.
"""
