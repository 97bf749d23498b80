"""The nouns of Graftwork. Frozen, typed, without any input or output."""
