"""Many runs as one: all models of a project, sweeps, federated rounds."""
