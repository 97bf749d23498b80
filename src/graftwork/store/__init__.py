"""State that outlives a process: SQLite at a path, or PostgreSQL by URL. Only this folder knows SQL."""
