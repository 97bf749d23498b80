"""The coordinator of `graft up`: the steps of a cycle for a project, and for a simulated month."""
