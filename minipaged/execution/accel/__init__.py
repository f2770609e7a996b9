"""What makes a model faster: fused layers, packed weights, whole decode steps; and the machine's limits."""
