"""The steps, one file each, the same shape each: a STEP, and the function that does it."""
