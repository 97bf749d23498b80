"""The data stage: from logs to audited, deduplicated, split and rendered datasets.

`prepare` runs it; the sub-packages are in the order of the data: ingest, audit (checks of single rows),
dedup (fingerprints), corpus, split, render, export, inspect.
"""
