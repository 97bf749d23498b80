"""Child processes and other machines: workers and their heartbeat, pieces of work, messages, the sandbox."""
