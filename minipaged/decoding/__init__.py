"""How the next tokens are chosen, and when a text ends. Only `sampling` and `logits` need torch."""
