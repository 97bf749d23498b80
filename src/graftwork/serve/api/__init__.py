"""The APIs that clients speak: requests checked, answers written. No clock, network or model."""
