"""Generation: batched decoding with a KV cache, sampling, recorded steps on a GPU."""
