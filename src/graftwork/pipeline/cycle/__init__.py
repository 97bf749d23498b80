"""The coordinator of `graft up`: the steps of a cycle for a project, and the plan of a week followed."""
