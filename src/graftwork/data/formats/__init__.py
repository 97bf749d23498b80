"""The shapes that a logged row may have, one file each, all with the same names in it.

`EXPECTS` says in words what such a row holds. `fits(row) -> bool` says by the keys alone whether
the row has this shape. `to_interaction(row, origin) -> Interaction` reads it, and raises `BadRow`
naming the key that is wrong; a shape whose rows hold several exchanges has `to_interactions`
instead. `turns` and `facts` are what they share.

To add one: write a file with these names and enter it in `FORMATS` in `choose.py`, before any
shape that would also fit its rows, and in `FormatName` of the settings.
"""
