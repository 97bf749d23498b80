"""A stand-in for verifiers 0.4: the part of its interface that task sets and our worker use."""
