"""What only makes a model faster: fused layers, packed weights; CUDA graphs of its decodes."""
