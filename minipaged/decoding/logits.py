"""How parameters edit logits: masks, bias and penalties; then temperature and filters.

Every row of a batch may have different settings, and one call serves them all: edits become flat lists of
(row, token) pairs, and the three filters become one threshold per row, since each of them keeps the tokens
above some logit. The order is transformers' (see `SamplingParams`); vLLM's differs in applying min-p before
top-k, which keeps the same tokens unless top-p is used too.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from minipaged.decoding.ngrams import repeating_tokens
from minipaged.decoding.params import SamplingParams
from minipaged.decoding.processors import process
from minipaged.decoding.row_sums import log_of_sums
from minipaged.decoding.stopping import end_token_ids
from minipaged.decoding.structured import allowed_tokens
from minipaged.decoding.typical import keep_typical
from minipaged.kernels.on_device import on_device
from minipaged.scheduling.request import Sequence

SHORTLIST = 64
"""Likeliest tokens that top-p looks at first; only rows that need more sort the whole vocabulary. A
top-k's list has half as many beyond the k-th, which may be as likely."""


def edit_logits(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: Collection[int]
) -> torch.Tensor:
    """Logits [rows, vocab_size] float32 with the masks, biases and penalties of each row's sequence.

    A copy, or `logits` itself when no row asks for an edit. EOS is forbidden before `min_tokens`.
    """
    processed, structured, allowed, biased, forbidden, penalized = [], [], [], [], [], []
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if sequence.num_generated_tokens < params.min_tokens:
            forbidden += [(row, token_id) for token_id in end_token_ids(params, eos_token_ids)]
        if not isinstance(params, SamplingParams):
            continue
        if params.logits_processors:
            processed.append(row)
        if params.structured_outputs is not None:
            structured.append(row)
        if params.allowed_token_ids is not None:
            allowed.append(row)
        if params.bad_words:
            forbidden += [(row, token_id) for token_id in _ends_of_bad_words(params.bad_words, sequence)]
        if size := params.no_repeat_ngram_size:
            forbidden += [(row, token_id) for token_id in repeating_tokens(sequence.token_ids, size)]
        if params.logit_bias:
            biased.append(row)
        if params.has_penalties:
            penalized.append(row)
    if not (processed or structured or allowed or biased or forbidden or penalized):
        return logits
    logits = logits.clone()
    for row in processed:
        logits[row] = process(sequences[row], logits[row])
    if structured:
        mask = allowed_tokens([sequences[row] for row in structured], logits.shape[1])
        rows = on_device(structured, logits.device)
        logits[rows] = logits[rows].masked_fill_(~on_device(mask, logits.device), -math.inf)
    for row in allowed:
        ids = on_device(sequences[row].request.params.allowed_token_ids, logits.device)
        kept = logits[row, ids]
        logits[row] = -math.inf
        logits[row, ids] = kept
    if biased:
        _bias(logits, biased, [sequences[row].request.params.bias_columns for row in biased])
    if forbidden:
        rows, ids = (on_device(column, logits.device) for column in zip(*forbidden))
        logits[rows, ids] = logits.new_full((), -math.inf)  # (a number would have to be copied there)
    if penalized:
        _penalize(logits, penalized, [sequences[row] for row in penalized])
    return logits


def filter_logits(logits: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """Temperature (above 0), then top-k, top-p, min-p and typical_p of each row.

    Takes and returns logits [rows, vocab_size] float32. Tokens are sampled from the softmax of what it
    returns, in which dropped tokens are -inf.
    """

    def column(values: list[float]) -> torch.Tensor:
        return on_device(values, logits.device, torch.float32).unsqueeze(1)

    # The maximum is moved to 0 first: a small temperature then cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(column([p.temperature for p in params]))
    threshold = column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
    vocab_size = logits.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    rows = [row for row, p in enumerate(params) if top_k[row] < vocab_size or p.top_p < 1.0]
    shortlist = max([SHORTLIST, *(k + SHORTLIST // 2 for k in top_k if k < vocab_size)])
    has_threshold = bool(rows) or any(p.min_p for p in params)
    for size in (min(shortlist, vocab_size), vocab_size):
        if not rows:
            break
        index = on_device(rows, logits.device)
        top_p = column([params[row].top_p for row in rows])
        lowest, enough = _lowest_kept(scaled[index], size, [top_k[row] for row in rows], top_p)
        threshold[index] = torch.maximum(threshold[index], lowest)
        rows = [row for row, done in zip(rows, enough.tolist()) if not done]
    if has_threshold:
        scaled.masked_fill_(scaled < threshold, -math.inf)
    typical = [row for row, p in enumerate(params) if p.typical_p < 1]
    if typical:
        index = on_device(typical, logits.device)
        scaled[index] = keep_typical(scaled[index], column([params[row].typical_p for row in typical]))
    return scaled


def _lowest_kept(
    logits: torch.Tensor, size: int, top_k: list[int], top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit [rows, 1] that top-k and then top-p keep, among the `size` highest of each row.

    Also whether [rows] those were enough to decide; if not, a longer list is needed.
    """
    vocab_size = logits.shape[1]
    ranked = logits.sort(-1, descending=True) if size == vocab_size else logits.topk(size)
    values = ranked.values
    has_top_k = on_device([k < vocab_size for k in top_k], logits.device).unsqueeze(1)
    last = on_device([min(k, size) - 1 for k in top_k], logits.device).unsqueeze(1)
    kth = values.gather(1, last)
    kept = torch.where(values < kth, -math.inf, values)
    # Top-p is a share of what top-k left: of the list (others may make it longer), or of all tokens.
    weights = kept.exp()
    sums = weights.cumsum(-1)
    before = sums - weights
    total = torch.where(has_top_k, sums[:, -1:], log_of_sums(logits).exp())
    # The first token is always kept; a later one if those before it hold less than top_p.
    num_kept = ((before < top_p * total) & (kept > -math.inf)).sum(-1, keepdim=True).clamp_(min=1)
    lowest = torch.where(top_p < 1.0, values.gather(1, num_kept - 1), kth)
    has_all_of_top_k = (values[:, -1:] < kth) | (top_p == 1.0)  # (some may be equal to the k-th)
    enough = torch.where(has_top_k, has_all_of_top_k, num_kept < size) | (size == vocab_size)
    return torch.where(enough, lowest, -math.inf), enough.squeeze(1)


def _bias(logits: torch.Tensor, rows: list[int], columns: list[tuple[array[int], array[float]]]) -> None:
    """Add each row's own numbers to the logits of its own tokens, in place."""
    ids = np.concatenate([np.frombuffer(ids, np.int64) for ids, _ in columns])
    values = np.concatenate([np.frombuffer(values, np.float32) for _, values in columns])
    owner = np.repeat(np.array(rows), [len(ids) for ids, _ in columns])
    places = on_device(owner * logits.shape[1] + ids, logits.device)
    flat = logits.view(-1)  # (no place occurs twice)
    flat[places] += on_device(values, logits.device)


def _penalize(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    """Repetition, frequency and presence penalties, in place."""
    device, vocab_size = logits.device, logits.shape[1]
    flat = logits.view(-1)
    params = [sequence.request.params for sequence in sequences]

    def occurrences(tokens: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([len(ids) for ids in tokens])
        ids = torch.from_numpy(np.concatenate(tokens)).long()
        owner = torch.arange(len(tokens)).repeat_interleave(lengths)
        places = torch.tensor(rows)[owner] * vocab_size + ids
        return on_device(owner, device), on_device(places, device)

    def of_owner(name: str, owner: torch.Tensor) -> torch.Tensor:
        return on_device([getattr(p, name) for p in params], device, torch.float32)[owner]

    owner, places = occurrences([np.frombuffer(sequence.token_ids, np.int32) for sequence in sequences])
    penalty = of_owner("repetition_penalty", owner)
    # A token that occurs twice is written twice, with the same value.
    values = flat[places]
    flat[places] = torch.where(values < 0, values * penalty, values / penalty)
    owner, places = occurrences(
        [np.frombuffer(s.token_ids, np.int32)[s.num_prompt_tokens :] for s in sequences]
    )
    if len(places) == 0:
        return
    counts = torch.zeros_like(flat).index_add_(0, places, torch.ones_like(places, dtype=flat.dtype))[places]
    discount = of_owner("frequency_penalty", owner) * counts + of_owner("presence_penalty", owner)
    flat[places] = flat[places] - discount


def _ends_of_bad_words(words: SequenceOf[str | tuple[int, ...]], sequence: Sequence) -> Iterator[int]:
    # A word of several tokens is forbidden by its last one, after the others.
    tokens = sequence.token_ids
    for word in words:
        assert not isinstance(word, str)
        start = len(tokens) - (len(word) - 1)
        if start >= 0 and tuple(tokens[start:]) == word[:-1]:
            yield word[-1]
