"""From files to interactions: find files, cut them into blocks, split containers, read formats."""
