"""How the next tokens are chosen, and when a text ends.

Only `sampling` and its helpers (`logits`, `noise`, `processors`, `row_sums`, `typical`) need torch.
"""
