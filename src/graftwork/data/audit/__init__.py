"""What is wrong with logs: checks of single rows, and findings about the corpus."""
