"""Components from specifications: a spec tree in, verified components with evidence and episodes out."""
