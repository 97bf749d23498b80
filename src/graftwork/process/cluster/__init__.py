"""One map over many pieces on the nodes of a Ray cluster, or on this machine."""
