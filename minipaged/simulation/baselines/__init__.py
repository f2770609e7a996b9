"""The systems of the sources: Orca's contiguous memory, FasterTransformer's static batches, and others."""
