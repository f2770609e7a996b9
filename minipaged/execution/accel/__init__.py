"""What only makes a model faster: `optimize` rewrites its layers, `CUDAGraphRunner` replays its decodes."""
