"""A model is rewritten, mostly to make it faster; its decode steps run as a whole; the machine's limits."""
