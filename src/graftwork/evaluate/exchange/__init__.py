"""Results of other tools, in and out: inspect-ai logs and lm-eval results.

In: files as those tools write them, or an evaluation of ours. Out: runs that become a Report, or files
that those tools read. Nothing of a file is executed, and no package of theirs is needed.
"""
