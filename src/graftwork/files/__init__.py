"""What is done to files alone: written whole, hashed, appended to."""
