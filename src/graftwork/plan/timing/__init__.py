"""Seconds of a training step, by what they are spent on. `graftwork.plan.time` is the door."""
