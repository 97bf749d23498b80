"""The shapes that a logged row may have, one file each, all with the same two functions.

`fits(row) -> bool` says by the keys alone whether the row has this shape. `to_interaction(row,
origin) -> Interaction` reads it, and raises `BadRow` naming the key that is wrong.

To add one: write a file with the two functions and name it in `FORMATS` in `read.py`, before any
shape that would also fit its rows.
"""
