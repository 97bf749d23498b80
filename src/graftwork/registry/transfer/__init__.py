"""Releases leaving and entering the store: archives, a store at a URL, the Hub, SSH, trackers."""
