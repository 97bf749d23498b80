"""What keeps an endpoint answering: balancing, circuit breakers, retry budget, fallback chains. No I/O."""
