"""The manners of a child process: one worker a folder, a heartbeat, an end that can be read."""
