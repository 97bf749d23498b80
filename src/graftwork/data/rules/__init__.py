"""What an audit looks for, one family of faults a file, all of one shape.

A family that can see its fault in one row alone has `look(raw, redacted, *, sight)`, which yields a
`Note` for each fault of that row; it runs in the worker that reads the row, once, and the note is all
that is kept. Every family has `find(facts)`, which yields a finding for each kind of fault that the
corpus has, from the gathered notes or from its columns, and nothing for a kind that it has not.

To add a family: write a file with these functions, name it in `ROW_RULES` in `look.py` where it
looks at rows, and in `RULES` in `audit.py`.
"""
