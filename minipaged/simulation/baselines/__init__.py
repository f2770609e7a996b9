"""What the paper compares itself with: Orca's contiguous memory, FasterTransformer's static batches."""
