"""Does it fit, how is it best set, how long does it take: a question in, an answer with ranges out. Pure."""
