"""The operations of paper section 5.1 in plain PyTorch: the definition of correct, and the CPU backend."""
