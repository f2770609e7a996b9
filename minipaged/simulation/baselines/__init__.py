"""The paper's baselines: Orca's contiguous memory and FasterTransformer's static batches."""
