"""What was found, as one page that one would show a colleague.

`inputs` is all that the page is told, `plots` and `row_plots` draw, `differences` compares answers,
`page` puts it together. Records in, text out; nothing here reads a file of the project.
"""
