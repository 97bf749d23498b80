"""The records of Graftwork: frozen, typed, without I/O."""
