"""The rules, by what they look at. Each is one function of a configuration and what stands around it."""
