"""Model families, each defined once: layers, parameters, step recipe. `registry` finds them."""
