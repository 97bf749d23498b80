"""Child processes: one worker per folder, a heartbeat, a readable exit; the sandbox; extensions."""
