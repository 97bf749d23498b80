"""One table of steps, the wiring between stages and store, supervision of child processes."""
