"""Cases put to a subject, in a process of its own, and every answer kept.

`worker` runs one subject, `runner` puts its cases to an engine or an endpoint, `shards` shares them out,
`answers` keeps them, `timing` times single requests of several subjects in turn, `prompt_search` improves the
instruction of the base. `served_endpoint` asks the project's own endpoint as a user would.
"""
