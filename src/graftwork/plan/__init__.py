"""Does it fit, how long, how much: pure maths on facts."""
