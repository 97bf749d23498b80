"""What a run costs, where: pure maths on dated prices, the rules of places and the hours of a run."""
