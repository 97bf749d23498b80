"""Releases on their way out and in: archives, PEFT folders, the Hub, machines that serve, trackers."""
