"""Who works together on a step: alone, or several processes that share its rows. One file a strategy."""
