"""All rows of the logs on disk, with their features, in row order."""
