"""The same scheduler and memory manager on a simulated clock, for experiments without a GPU. No torch."""
