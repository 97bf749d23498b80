"""Show, trace and compare datasets."""
