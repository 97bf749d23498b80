"""What was found, as one page that one would show a colleague.

`inputs` is all that the page is told, `plots`, `row_plots` and `training_plots` draw, `differences`
compares answers, `training` shows the course of a run, `page` puts it all together. Records in, text
out; nothing here reads a file of the project.
"""
