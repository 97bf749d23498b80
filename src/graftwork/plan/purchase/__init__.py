"""Whether to buy cards, which, or to rent: pure maths on prices, hours of runs and years of use."""
