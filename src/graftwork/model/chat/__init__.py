"""Chat templates: messages to tokens, with proof of which tokens are the reply."""
