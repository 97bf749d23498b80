"""Chat templates: rendering messages to tokens and marking the trained span."""
