"""Jobs on other machines: bundles, places, the ledger and its reconciler.

`place.py` says how to add a place.
"""
