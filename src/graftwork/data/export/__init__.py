"""Datasets in the formats of others: one file a format, the same set of functions in each.

A format module has
- `check_options(options)`: a mistake is said before anything is written;
- `add_row(sink, split, row)`: one row goes to its file, or is left out with a reason;
- `finish(sink, dataset, options)`: the files that describe the others; gives back notes for the user.
"""
