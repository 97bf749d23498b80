"""Jobs on other machines: bundles, places, the ledger and its reconciler.

To add a place, write a class with the methods of `fleet/place.py` (`fleet/hosts.py` has two) and declare it
in an installed package: `[project.entry-points."graftwork.places"] NAME = "module:Class"`. The class is
called without arguments.
"""
