"""One map over many pieces on the nodes of a cluster: Ray tasks or a Slurm array."""
