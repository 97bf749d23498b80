"""A teacher answers rows again that would be dropped: targets, budget, acceptance, the repaired log."""
