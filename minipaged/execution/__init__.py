"""A plan becomes tensors, a forward pass and samples. Torch starts here (but not in `executor`)."""
