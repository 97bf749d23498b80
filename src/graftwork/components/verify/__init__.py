"""Verification: generated sources in, verdicts and evidence out. Generated code runs in the sandbox alone."""
