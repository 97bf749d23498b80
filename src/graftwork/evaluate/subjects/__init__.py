"""Who is asked: a model of our own, vLLM, an endpoint, the log; and where their answers are kept."""
