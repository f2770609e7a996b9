"""Logits -> candidate tokens, for a batch in which every request has its own settings.

A greedy row takes its largest logit, a random row its largest logit + Gumbel noise, a beam row its best
log-probabilities: the decoding methods differ only in what they take from a step.
A row's result depends only on its own logits, settings, seed and tokens. Log-probabilities are those of the
model's own distribution, before masks, penalties and temperature; those that beams are compared by have
forbidden tokens at -inf, and follow the beams' temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch

from minipaged.decoding.logits import edit_logits, filter_logits
from minipaged.decoding.noise import gumbel_noise, mix, noise_key
from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.decoding.processors import failure
from minipaged.decoding.row_sums import log_of_sums
from minipaged.kernels.dispatch import GreedyTokens, greedy_tokens
from minipaged.kernels.on_device import on_device, start_reading
from minipaged.scheduling import Sample, ScheduledSequence
from minipaged.scheduling.request import TopLogprobs

DRAW_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""The most logits that are filtered, or get noise, at once: 4 MB per tensor on a CPU (its cache), 64 MB on a
GPU (most steps as a whole)."""

Follow = Callable[[SequenceOf[int], torch.Tensor], None]
"""(rows, their tokens [len(rows)] int64): called when the device knows them, before the host reads them."""


class Sampler:
    """Turns the logits of a step into samples.

    A request without a seed gets its random stream from `seed` and its place in the order of arrival: two
    equal requests differ, and a whole run is reproducible. `greedy` chooses in steps whose rows are all
    plain greedy.
    """

    def __init__(
        self, eos_token_ids: Collection[int] = (), seed: int = 0, greedy: GreedyTokens = greedy_tokens
    ) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed = seed
        self._greedy = greedy

    def __call__(
        self,
        logits: torch.Tensor,
        scheduled: SequenceOf[ScheduledSequence],
        follow: Follow | None = None,
    ) -> list[Sample]:
        """One sample for each row of logits [rows, vocab_size], any float type, and its scheduled sequence.

        A beam row has `num_candidates` tokens (at most the vocabulary), the best first; a random row one for
        each sample, in order. A row without a valid token (see `find_errors`) has the log-probability NaN.
        With `follow`, which may overwrite `logits`, every row has one candidate and no `logprobs`.
        """
        params = [item.sequence.request.params for item in scheduled]
        plain = [row for row, p in enumerate(params) if p.is_plain_greedy]
        found = self._greedy(take_rows(logits, plain)) if plain else logits.new_empty(0, 2)
        if len(plain) == len(params):
            after = follow and partial(follow, plain, found[:, 0].long())
            return [Sample([int(token)], [logprob]) for token, logprob in _read(found, after)]
        logits = logits.float()
        edited = edit_logits(logits, [item.sequence for item in scheduled], self.eos_token_ids)
        total = log_of_sums(logits)[:, 0]
        # Without a valid token, its log-probability and all that follow from it are NaN.
        is_valid = total.isfinite()
        if edited is not logits:
            is_valid &= edited.amax(-1).isfinite()
        total = total.where(is_valid, math.nan)
        beams = [row for row, p in enumerate(params) if isinstance(p, BeamSearchParams)]
        samples = _best_of_beams(beams, scheduled, logits, edited, total) if beams else {}
        greedy = [row for row, p in enumerate(params) if p.is_greedy and not p.is_plain_greedy]
        picks = [found[:, 0].long(), *([take_rows(edited, greedy).argmax(-1)] if greedy else [])]
        random = [row for row, p in enumerate(params) if row not in samples and not p.is_greedy]
        size = rows_at_a_time(logits)
        for start in range(0, len(random), size):
            part = random[start : start + size]
            picks.append(self._draw(take_rows(edited, part), [scheduled[row] for row in part]))
        rows = [*plain, *greedy, *(row for row in random for _ in range(scheduled[row].num_candidates))]
        if rows:
            tokens, index = torch.cat(picks), on_device(rows, logits.device)
            logprobs = logits[index, tokens] - total[index]
            logprobs[: len(plain)] = found[:, 1]  # (the same bits as in a step whose rows are all plain)
            samples |= _as_samples(rows, tokens, logprobs, follow)
        _report_asked(samples, params, logits, total)
        return [samples[row] for row in range(len(scheduled))]

    def _draw(self, logits: torch.Tensor, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        """Token ids [candidates of all sequences], in the order of the sequences."""
        filtered = filter_logits(logits, [item.sequence.request.params for item in scheduled])
        owners, keys = [], []
        for owner, (sequence, _, _, num_candidates) in enumerate(scheduled):
            request = sequence.request
            seed = request.params.seed
            stream = sequence.index + (mix(mix(self.seed) + request.arrival) if seed is None else seed)
            owners += [owner] * num_candidates
            keys += [noise_key(stream + i, sequence.num_generated_tokens) for i in range(num_candidates)]
        picks, size = [], rows_at_a_time(logits)  # (a row may want hundreds of samples)
        for start in range(0, len(keys), size):
            noise = gumbel_noise(keys[start : start + size], logits.shape[1], logits.device)
            picks.append(noise.add_(take_rows(filtered, owners[start : start + size])).argmax(-1))
        return torch.cat(picks)


def rows_at_a_time(logits: torch.Tensor) -> int:
    """Rows that are drawn together, see `DRAW_ELEMENTS`."""
    return max(1, DRAW_ELEMENTS.get(logits.device.type, 1 << 20) // logits.shape[1])


def take_memory(logits: torch.Tensor) -> None:
    """Use as much memory as sampling these rows takes at most, so that it can be measured."""
    wide = logits.float()
    edited = wide.clone()
    flat = torch.zeros_like(edited[: rows_at_a_time(edited)])  # so that all filters sort whole rows
    filtered = filter_logits(flat, [SamplingParams(top_p=0.9, typical_p=0.9)] * len(flat))
    gumbel_noise([0] * len(flat), flat.shape[1], flat.device).add_(filtered)


def find_errors(
    samples: SequenceOf[Sample], scheduled: SequenceOf[ScheduledSequence], logits: torch.Tensor
) -> dict[str, str]:
    """Request id -> why one of its rows has no valid token."""
    errors = {}
    for row, (sample, item) in enumerate(zip(samples, scheduled)):
        if math.isnan(sample.logprobs[0]):
            sequence = item.sequence
            errors[sequence.request.request_id] = failure(sequence) or (
                _why_forbidden(sequence.request.params)
                if logits[row].amax().isfinite()
                else "the model's logits are not finite: its weights may have NaN, or its dtype overflows"
            )
    return errors


def _why_forbidden(params: DecodingParams) -> str:
    masks = "structured_outputs allowed_token_ids bad_words min_tokens logit_bias no_repeat_ngram_size"
    given = [name for name in [*masks.split(), "logits_processors"] if getattr(params, name, None)]
    if given == ["structured_outputs"]:
        return (
            "structured_outputs forbid every token: the grammar is too large to follow, or has an end token "
            "where the text may not end; simplify it"
        )
    return f"{' and '.join(given)} forbid every token; relax one of them"


def prompt_logprobs(logits: torch.Tensor, token_ids: SequenceOf[int], count: int) -> list[TopLogprobs]:
    """For each known token the `count` likeliest, the best first, and itself.

    Row i of logits [tokens, vocab_size] predicts token_ids[i]: the logits of the position before it.
    """
    logits = logits.float()
    rows = list(range(len(token_ids)))
    known = on_device(token_ids, logits.device)
    return _report(logits, log_of_sums(logits)[:, 0], rows, known, [count] * len(rows))


def _best_of_beams(
    rows: list[int],
    scheduled: SequenceOf[ScheduledSequence],
    logits: torch.Tensor,
    edited: torch.Tensor,
    total: torch.Tensor,
) -> dict[int, Sample]:
    """The candidates of each beam row, by the log-probabilities that beams are compared by."""
    temperatures = [[scheduled[row].sequence.request.params.temperature] for row in rows]
    temperature = on_device(temperatures, logits.device)
    divisor = take_rows(total, rows)[:, None]
    if any(value != 1 for [value] in temperatures):
        warm = log_of_sums(take_rows(logits, rows) / temperature)
        divisor = warm.where(divisor.isfinite(), math.nan)
    counts = [min(scheduled[row].num_candidates, logits.shape[1]) for row in rows]
    ids, logprobs = _on_host(*_likeliest(take_rows(edited, rows) / temperature - divisor, counts).flatten(1))
    starts = range(0, len(ids), max(counts))
    return {
        row: Sample(ids[start : start + count], logprobs[start : start + count])
        for row, start, count in zip(rows, starts, counts)
    }


def _as_samples(
    rows: list[int], tokens: torch.Tensor, logprobs: torch.Tensor, follow: Follow | None
) -> dict[int, Sample]:
    """Samples by row; `rows` names the row of each token, the tokens of a row are consecutive."""
    samples = {row: Sample([], []) for row in rows}
    found = _on_host(tokens, logprobs, follow and partial(follow, rows, tokens))
    for row, token, logprob in zip(rows, *found):
        samples[row].token_ids.append(token)
        samples[row].logprobs.append(logprob)
    return samples


def _report_asked(
    samples: dict[int, Sample], params: SequenceOf[DecodingParams], logits: torch.Tensor, total: torch.Tensor
) -> None:
    """Add the likeliest tokens to the samples of the rows that ask for them."""
    asked = [row for row in samples if params[row].logprobs is not None]
    if asked:
        rows = [row for row in asked for _ in samples[row].token_ids]
        tokens = on_device([t for row in asked for t in samples[row].token_ids], logits.device)
        reports = iter(_report(logits, total, rows, tokens, [params[row].logprobs or 0 for row in rows]))
        for row in asked:
            found = [next(reports) for _ in samples[row].token_ids]
            samples[row] = samples[row]._replace(top_logprobs=found)


def _on_host(
    tokens: torch.Tensor, logprobs: torch.Tensor, follow: Callable[[], None] | None = None
) -> tuple[list[int], list[float]]:
    # One transfer, as each waits for the device; float32 represents every token id (below 2^24) exactly.
    ids, values = _read(torch.stack((tokens, logprobs)), follow)
    return [int(token) for token in ids], values


def _read(found: torch.Tensor, follow: Callable[[], None] | None) -> Any:
    if follow is None:
        return found.tolist()
    read = start_reading(found)
    follow()
    return read()


def _report(
    logits: torch.Tensor, total: torch.Tensor, rows: list[int], tokens: torch.Tensor, counts: list[int]
) -> list[TopLogprobs]:
    """For tokens[i] of row rows[i]: the token itself, then the counts[i] likeliest others of that row.

    The likeliest token has rank 1. Among equally likely tokens, the reported ones come first.
    """
    logprobs = take_rows(logits, rows) - take_rows(total, rows)[:, None]
    counts = [logits.shape[1] if count == -1 else count for count in counts]
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    likelier = (logprobs > own.unsqueeze(1)).sum(-1)
    table = torch.cat((*_likeliest(logprobs, counts), torch.stack((tokens, own, likelier), dim=1)), dim=1)
    reports = []
    for count, (*found, token, value, num_before) in zip(counts, table.tolist()):  # (as in `_on_host`)
        ids, values = found[: len(found) // 2], found[len(found) // 2 :]
        report: TopLogprobs = {int(token): (value, max(count, int(num_before)) + 1)}
        report |= {int(ids[i]): (values[i], i + 1) for i in range(count)}
        reports.append(report)
    return reports


def _likeliest(logprobs: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Ids and log-probabilities [2, rows, max(counts)] of the counts[i] likeliest tokens of row i."""
    found = logprobs.new_zeros(2, len(counts), max(counts))
    for count in set(counts):  # (among equal ones, `topk` picks others when asked for more)
        rows = [row for row, own in enumerate(counts) if own == count]
        best = take_rows(logprobs, rows).topk(count)
        found[:, on_device(rows, logprobs.device), :count] = torch.stack((best.indices, best.values))
    return found


def take_rows(rows_of: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The rows named; the tensor itself when that is all of them in order."""
    if rows == list(range(rows_of.shape[0])):
        return rows_of
    return rows_of[on_device(rows, rows_of.device)]
