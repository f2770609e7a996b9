"""Locally typical sampling: keep the tokens whose information is nearest to the expected one.

-log p of a token is its information; its expectation is the entropy of the distribution. A token that is far
likelier than that adds no information, and one that is far less likely makes no sense. (C. Meister et al.,
*Locally Typical Sampling*, arXiv 2202.00666.)
"""

from __future__ import annotations

import torch

from minipaged.decoding.row_sums import two_or_more


def keep_typical(logits: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocab_size] with -inf for all but the most typical tokens that hold `mass` [rows, 1]."""
    logprobs = logits.log_softmax(-1)
    terms = two_or_more(logprobs.exp() * logprobs)
    entropy = -terms.nansum(-1, keepdim=True)[: logits.shape[0]]
    distance = (-logprobs - entropy).abs()
    ranked, order = distance.sort(-1)
    held = logprobs.exp().gather(1, order).cumsum(-1)
    last = (held < mass).sum(-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    return logits.masked_fill(distance > ranked.gather(1, last), -torch.inf)
