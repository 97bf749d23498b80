"""Jobs on other machines: bundles, places, the ledger and its reconciler.

To add a place, write a class with the methods of `fleet/place.py` (`fleet/places/` has each of ours in a file
of its own) and declare it in an installed package: `[project.entry-points."graftwork.places"] NAME =
"module:Class"`. The class is called without arguments.
"""
