"""The step on a processor: what is frozen is read once, packed once, and never differentiated."""
