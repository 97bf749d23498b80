"""What an audit looks for, one family of faults a file, all with one function.

`find(log) -> Iterator[Finding]` yields a finding for each kind of fault that the log has, and
nothing for a kind that it has not.

To add a family: write a file with that function and name it in `RULES` in `audit.py`.
"""
