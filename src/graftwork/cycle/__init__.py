"""The training cycle: when it is due, what comes next, and its durable state. No I/O."""
