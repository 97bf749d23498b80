"""Answers judged by another model, through any OpenAI-compatible endpoint.

`wording` writes what the judge is asked and reads what it says, `client` asks over HTTP, `store` keeps
every word it said, `panel` asks about many answers within a `budget`, `tally` counts, `verdicts` put it
into a report.
"""
