"""`graft worker --stdio`: a run that is driven by another program over standard input and output."""
