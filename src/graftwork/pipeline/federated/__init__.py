"""Rounds of training at places whose data stays there."""
