"""Cases put to a subject, in a process of its own, and every answer kept.

`worker` runs one subject, `runner` puts its cases in batches, `endpoint` puts them to an endpoint, `answers`
keeps them, `timing` times single requests of several subjects in turn.
"""
