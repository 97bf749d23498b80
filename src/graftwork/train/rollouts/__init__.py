"""Rollouts: prompts in, graded answers of the model in training out, as rows."""
