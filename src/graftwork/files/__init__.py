"""Plain file operations: writing atomically, hashing, appending."""
