"""Answers judged by another model, through any OpenAI-compatible endpoint.

`judge` asks and reads, `tally` counts verdicts and puts them into a report.
"""
