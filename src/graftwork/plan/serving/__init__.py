"""What serving a model will take: memory, latency, users, specialists. Pure maths on facts."""
