"""Generation: a plan and a model in, a package of verified components out, with every attempt kept."""
