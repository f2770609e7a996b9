"""Logits -> candidate tokens, for a batch in which every request has settings of its own.

A greedy row takes its largest logit, a random row its largest logit + Gumbel noise, a beam row its
best log-probabilities (paper, section 5.2: the decoding methods differ only in what they take from a
step). A row's result depends on its own logits, settings, seed and tokens alone: not on the other
rows, nor on how the steps before were cut. Log-probabilities are those of the model's own
distribution, before masks, penalties and temperature; for beams, with forbidden tokens at -inf.
Knows neither blocks nor models. Imported only by what runs a model: it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import torch

from minipaged.decoding.logits import edit_logits, filter_logits
from minipaged.decoding.noise import gumbel_noise, mix, noise_key
from minipaged.decoding.params import SamplingParams
from minipaged.kernels.reference.sampling import greedy_tokens
from minipaged.scheduling import Sample, ScheduledSequence
from minipaged.scheduling.request import Sequence

DRAW_ELEMENTS = 1 << 20
"""Logits that are filtered and get noise at a time: 4 MB a tensor, which stays in a CPU's cache."""


class Sampler:
    """Turns the logits of a step into samples.

    Args:
        eos_token_ids: the model's EOS tokens.
        seed: of requests without a seed; each gets a random stream by its place in the order of
            arrival, so two equal requests differ, and a whole run can be repeated.
        greedy: the backend's choice for steps in which every row is greedy and wants nothing else.
    """

    def __init__(
        self,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
        greedy: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = greedy_tokens,
    ) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed = seed
        self._greedy = greedy

    def __call__(self, logits: torch.Tensor, chunks: SequenceOf[ScheduledSequence]) -> list[Sample]:
        """Sample.

        Args:
            logits: [rows, vocab_size], any float type, of the last token of each chunk; not changed.
            chunks: one per row, each with `num_candidates` >= 1.

        Returns:
            One sample per row. A beam row has `num_candidates` tokens (at most the vocabulary), the
            best first; a random row one token per sample, in the order of the samples.
        """
        logits = logits.float()
        params = [chunk.sequence.request.params for chunk in chunks]
        if all(isinstance(p, SamplingParams) and p.is_plain_greedy for p in params):
            return [Sample([t], [p]) for t, p in zip(*_on_host(*self._greedy(logits)))]
        total = logits.logsumexp(-1)
        edited = edit_logits(logits, [chunk.sequence for chunk in chunks], self.eos_token_ids)
        samples: dict[int, Sample] = {}
        beams = [row for row, p in enumerate(params) if not isinstance(p, SamplingParams)]
        if beams:
            samples |= self._beam_candidates(edited, total, beams, chunks)
        greedy = [row for row, p in enumerate(params) if isinstance(p, SamplingParams) and p.is_greedy]
        random = [row for row, p in enumerate(params) if isinstance(p, SamplingParams) and not p.is_greedy]
        rows, picks = list(greedy), []
        if greedy:
            picks.append(_take(edited, greedy).argmax(-1))
        if random:
            size = max(1, DRAW_ELEMENTS // logits.shape[1])
            for start in range(0, len(random), size):
                part = random[start : start + size]
                picks.append(self._draw(_take(edited, part), [chunks[row] for row in part]))
            rows += [row for row in random for _ in range(chunks[row].num_candidates)]
        if rows:
            samples |= _as_samples(logits, total, rows, torch.cat(picks), params)
        return [samples[row] for row in range(len(chunks))]

    def _draw(self, logits: torch.Tensor, chunks: list[ScheduledSequence]) -> torch.Tensor:
        """Token ids [candidates of all chunks], in the order of the chunks."""
        filtered = filter_logits(logits, [chunk.sequence.request.params for chunk in chunks])
        owners, keys = [], []
        for owner, (sequence, *_, num_candidates) in enumerate(chunks):
            stream = self._stream(sequence)
            owners += [owner] * num_candidates
            keys += [noise_key(stream + i, sequence.num_generated_tokens) for i in range(num_candidates)]
        noise = gumbel_noise(keys, logits.shape[1], logits.device)
        return noise.add_(_take(filtered, owners)).argmax(-1)

    def _stream(self, sequence: Sequence) -> int:
        request = sequence.request
        seed = request.params.seed
        return sequence.index + (mix(mix(self.seed) + request.arrival) if seed is None else seed)

    @staticmethod
    def _beam_candidates(
        logits: torch.Tensor, total: torch.Tensor, rows: list[int], chunks: SequenceOf[ScheduledSequence]
    ) -> dict[int, Sample]:
        counts = [min(chunks[row].num_candidates, logits.shape[1]) for row in rows]
        index = torch.tensor(rows, device=logits.device)
        best = (logits[index] - total[index, None]).topk(max(counts))
        return {
            row: Sample(tokens[:count], logprobs[:count])
            for row, count, tokens, logprobs in zip(rows, counts, best.indices.tolist(), best.values.tolist())
        }


def prompt_logprobs(logits: torch.Tensor, token_ids: SequenceOf[int], count: int) -> list[dict[int, float]]:
    """Log-probabilities of tokens that are known, as for `SamplingParams.prompt_logprobs`.

    Args:
        logits: [tokens, vocab_size]; row i is the prediction of token_ids[i], that is, the logits of
            the position before it.
        token_ids: the tokens that came.
        count: likeliest tokens to report beside each.

    Returns:
        Per token {token id: log-probability}: the `count` likeliest, the best first, and the token.
    """
    logits = logits.float()
    rows = list(range(len(token_ids)))
    known = torch.tensor(token_ids, device=logits.device)
    return _report(logits, logits.logsumexp(-1), rows, known, [count] * len(rows))


def _as_samples(
    logits: torch.Tensor,
    total: torch.Tensor,
    rows: list[int],
    tokens: torch.Tensor,
    params: SequenceOf[SamplingParams],
) -> dict[int, Sample]:
    """Samples by row; `rows` names the row of each token, the tokens of a row stand together."""
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits[index, tokens] - total[index]
    samples: dict[int, Sample] = {}
    for row, token, logprob in zip(rows, *_on_host(tokens, logprobs)):
        top: list[dict[int, float]] | None = None if params[row].logprobs is None else []
        sample = samples.setdefault(row, Sample([], [], top))
        sample.token_ids.append(token)
        sample.logprobs.append(logprob)
    asked = [place for place, row in enumerate(rows) if params[row].logprobs is not None]
    if asked:
        asked_rows = [rows[place] for place in asked]
        counts = [params[row].logprobs or 0 for row in asked_rows]
        for row, report in zip(asked_rows, _report(logits, total, asked_rows, tokens[asked], counts)):
            samples[row].top_logprobs.append(report)  # type: ignore[union-attr]
    return samples


def _on_host(tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[list[int], list[float]]:
    # One transfer, for each waits for the device; float32 holds every token id (below 2^24) as it is.
    ids, values = torch.stack((tokens, logprobs)).tolist()
    return [int(token) for token in ids], values


def _report(
    logits: torch.Tensor, total: torch.Tensor, rows: list[int], tokens: torch.Tensor, counts: list[int]
) -> list[dict[int, float]]:
    """For tokens[i] of row rows[i]: the counts[i] likeliest tokens of that row, and the token itself."""
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits[index] - total[index, None]
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best = logprobs.topk(max(counts))
    reports = []
    for count, ids, values, token, value in zip(
        counts, best.indices.tolist(), best.values.tolist(), tokens.tolist(), own.tolist()
    ):
        report = dict(zip(ids[:count], values[:count]))
        report.setdefault(token, value)
        reports.append(report)
    return reports


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The rows named; the tensor itself when that is all of them in order."""
    if rows == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]
