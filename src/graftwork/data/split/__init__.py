"""Groups, split assignment, split state, the proof against leakage, model subsets."""
