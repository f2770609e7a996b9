"""PagedAttention as code to learn from and to generate with."""
