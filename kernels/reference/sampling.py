"""Greedy choice, with the log-probability that is reported beside it."""

from torch import Tensor


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first largest of each row of float32 logits [R, V] and its log-probability: ([R] int64, [R])."""
    tokens = logits.argmax(-1, keepdim=True)
    return tokens.squeeze(1), logits.gather(1, tokens).squeeze(1) - logits.logsumexp(-1)
