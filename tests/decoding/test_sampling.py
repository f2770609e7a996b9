"""Sampling: what parameters do to logits, what is drawn from them, and what is reported.

The oracle of the processors is transformers'. Chi-square tests run on fixed seeds: they pass always or
never; the odds in their docstrings are those of a sound generator failing on seeds picked afresh.
"""

import math
import random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as hf

from minipaged.decoding.logits import edit_logits, filter_logits
from minipaged.decoding.noise import gumbel_noise, noise_key
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.decoding.sampling import (
    DRAW_ELEMENTS,
    Sampler,
    find_errors,
    prompt_logprobs,
    rows_at_a_time,
    take_memory,
)
from tests.concepts.decoding_driver import make_sequence, schedule

VOCAB = 200
NEVER = -math.inf


def random_logits(rows, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def assert_same_logits(ours, theirs):
    """Equal where finite and -inf at the same places, up to a constant a row (softmax ignores it)."""
    assert torch.equal(ours == NEVER, theirs == NEVER)
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=0, atol=2e-5)


def filtered_by_transformers(row, params):
    ids = torch.zeros(1, 1, dtype=torch.long)
    row = row.unsqueeze(0)
    if params.temperature != 1.0:
        row = hf.TemperatureLogitsWarper(params.temperature)(ids, row)
    if params.top_k > 0:
        row = hf.TopKLogitsWarper(params.top_k)(ids, row)
    if params.top_p < 1.0:
        row = hf.TopPLogitsWarper(params.top_p)(ids, row)
    if params.min_p > 0:
        row = hf.MinPLogitsWarper(params.min_p)(ids, row)
    if params.typical_p < 1:
        row = hf.TypicalLogitsWarper(params.typical_p)(ids, row)
    return row[0]


def test_filters_equal_those_of_transformers_with_other_settings_in_every_row():
    """Catches one row's setting applied to another, a wrong order, an off-by-one at the threshold."""
    rng = random.Random(0)
    params = [
        SamplingParams(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 0, -1, 1, 2, 7, 50, 199, 200, 1000]),
            top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
            min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
            typical_p=rng.choice([1.0, 1.0, 0.999, 0.7, 0.2, 1e-6]),
        )
        for _ in range(300)
    ]
    logits = random_logits(300)
    assert_same_logits(
        filter_logits(logits, params),
        torch.stack([filtered_by_transformers(row, p) for row, p in zip(logits, params)]),
    )


@pytest.mark.parametrize(
    "options", [{"top_k": 100}, {"top_p": 0.7}, {"min_p": 0.1}, {"typical_p": 0.7}], ids=str
)
def test_a_filter_needs_no_other_row_that_has_one(options):
    """Catches a filter that is skipped where no row has top-k or top-p, and top-k past the short list."""
    rows, params = random_logits(2), [SamplingParams(**options), SamplingParams()]
    filtered = filter_logits(rows, params)
    assert_same_logits(filtered, torch.stack([filtered_by_transformers(*pair) for pair in zip(rows, params)]))
    assert (filtered == NEVER).any(-1).tolist() == [True, False]
    assert_same_logits(filter_logits(rows[:1], params[:1]), filtered[:1])


def test_top_p_of_a_flat_distribution_looks_past_the_shortlist():
    """Catches top-p cut at the short list of likely tokens; the rows beside it need no more."""
    logits = random_logits(4, vocab=3000) * torch.tensor([[0.01], [1.0], [0.05], [3.0]])
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_k=2)]
    ours = filter_logits(logits, params)
    assert_same_logits(ours, torch.stack([filtered_by_transformers(r, p) for r, p in zip(logits, params)]))
    assert (ours[0] > NEVER).sum() > 2000


def test_a_short_list_is_enough_for_most_rows(monkeypatch):
    """Catches the whole vocabulary sorted in every step: its cost grows with the vocabulary."""
    logits = torch.arange(1000.0).unsqueeze(0).repeat(3, 1)
    options = [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}]
    monkeypatch.setattr(torch.Tensor, "sort", None)
    kept = filter_logits(logits, [SamplingParams(**o) for o in options]) > NEVER
    assert kept.sum(-1).tolist() == [3, 40, 3]


def test_top_p_near_one_lets_nothing_past_top_k():
    """Catches probabilities whose rounded sum stays below top_p, so that what top-k dropped follows."""
    filtered = filter_logits(random_logits(300), [SamplingParams(top_k=20, top_p=1 - 1e-7)] * 300)
    assert (filtered > NEVER).sum(-1).max() <= 20


def test_top_k_keeps_as_many_tokens_however_unlikely():
    """Catches a top_p of 1 that cuts where the rounded sum of what is before reaches 1."""
    filtered = filter_logits(torch.tensor([[0.0, -30.0, -40.0]]), [SamplingParams(top_k=2)])
    assert (filtered > NEVER).tolist() == [[True, True, False]]


def test_typical_p_just_below_one_may_keep_every_token():
    """Catches a token looked for past the last one: float32 sums of all probabilities may end below 1."""
    params = [SamplingParams(typical_p=math.nextafter(1, 0))] * 20
    kept = filter_logits(random_logits(20), params) > NEVER
    assert kept.all(-1).any()  # (not of every row: a sum may also reach 1 before its last tokens)


def test_filters_leave_their_input_alone():
    """Catches a filter that spoils the logits from which log-probabilities are reported."""
    logits = random_logits(2)
    before = logits.clone()
    filter_logits(logits, [SamplingParams(top_k=3, temperature=0.5)] * 2)
    edit_logits(logits, [make_sequence([1], [2], SamplingParams(presence_penalty=1))] * 2, ())
    assert torch.equal(logits, before)


def test_a_tiny_temperature_does_not_overflow():
    """Catches inf - inf = NaN: the likeliest token must be sampled."""
    sampler, logits = Sampler(), random_logits(8) * 1e30
    scheduled = [
        schedule(make_sequence([1], params=SamplingParams(temperature=1.1e-5, seed=s))) for s in range(8)
    ]
    assert [s.token_ids[0] for s in sampler(logits, scheduled)] == logits.argmax(-1).tolist()


def test_extreme_settings_make_no_nan_and_forbid_what_is_forbidden():
    """Catches inf / inf and inf - inf, whose NaN would win every argmax: only tokens 1 and 2 are allowed."""
    options = [
        {"temperature": 1000},
        {"temperature": 1.1e-5},
        {"repetition_penalty": 100},
        {"repetition_penalty": 0.01},
        {"logit_bias": {1: 100, 2: -100}},
        {"top_p": 1e-300},
        {"top_p": 1 - 1e-12},
        {"min_p": 1e-300},
        {"min_p": 1},
        {"top_k": 1},
    ]
    for seed in range(20):
        params = [SamplingParams(allowed_token_ids=[1, 2], seed=seed, **option) for option in options]
        samples = Sampler()(
            random_logits(len(params), seed=seed) * 100,
            [schedule(make_sequence([1], [2], p)) for p in params],
        )
        assert {s.token_ids[0] for s in samples} <= {1, 2}
        assert all(math.isfinite(s.logprobs[0]) for s in samples)


def sequences_with(params_of, count=40):
    rng = random.Random(1)
    return [
        make_sequence(
            [rng.randrange(20) for _ in range(rng.randint(1, 9))],
            [rng.randrange(20) for _ in range(rng.randint(0, 9))],
            params_of(rng),
        )
        for _ in range(count)
    ]


def check_edits(sequences, expected, eos=()):
    logits = random_logits(len(sequences))
    wanted = [
        expected(torch.tensor([list(s.token_ids)]), row.unsqueeze(0), s)[0]
        for row, s in zip(logits, sequences)
    ]
    torch.testing.assert_close(edit_logits(logits, sequences, eos), torch.stack(wanted))


def test_repetition_penalty_equals_that_of_transformers():
    """Catches a penalty applied twice to a token that occurs twice, or not to the prompt."""
    check_edits(
        sequences_with(lambda rng: SamplingParams(repetition_penalty=rng.choice([0.5, 1.0, 1.3, 2.0]))),
        lambda ids, row, s: hf.RepetitionPenaltyLogitsProcessor(float(s.request.params.repetition_penalty))(
            ids, row
        ),
    )


def test_logit_bias_equals_that_of_transformers():
    """Catches a bias added to another row, or a forbidden token that is only made unlikely."""
    check_edits(
        sequences_with(lambda rng: SamplingParams(logit_bias={rng.randrange(VOCAB): 2.5, 3: -math.inf})),
        lambda ids, row, s: hf.SequenceBiasLogitsProcessor(
            {(token,): bias for token, bias in s.request.params.logit_bias.items()}
        )(ids, row),
    )


def test_the_bias_of_many_samples_is_read_once():
    """Catches a thousand Python objects for each sample in every step: 26 times as slow with 200 samples."""

    class Read(dict):
        times = 0

        def _read(self, name):
            self.times += 1
            return getattr(super(), name)()

        def __iter__(self):
            return self._read("__iter__")

        def items(self):
            return self._read("items")

        def values(self):
            return self._read("values")

    params = SamplingParams(logit_bias={5: 1.0, 7: -2.0})
    bias = Read(params.logit_bias)
    object.__setattr__(params, "logit_bias", bias)
    sequences = [make_sequence([1], [2], params) for _ in range(4)]
    for _ in range(3):
        edited = edit_logits(torch.zeros(4, VOCAB), sequences, ())
    assert (edited[:, 5] == 1).all()
    assert (edited[:, 7] == -2).all()
    assert bias.times <= 2


def test_bad_words_equal_those_of_transformers():
    """Catches the first token of a word forbidden on its own, or its last one always."""

    def words(rng):
        return [[rng.randrange(20) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(30)]

    check_edits(
        sequences_with(lambda rng: SamplingParams(bad_words=words(rng))),
        lambda ids, row, s: hf.NoBadWordsLogitsProcessor([list(w) for w in s.request.params.bad_words])(
            ids, row
        ),
    )


def test_ngrams_that_must_not_repeat_equal_those_of_transformers():
    """Catches an n-gram over the end of the prompt that is missed, and an off-by-one in its length."""
    sequences = sequences_with(lambda rng: SamplingParams(no_repeat_ngram_size=rng.choice([1, 2, 3, 4, 60])))

    check_edits(
        sequences,
        lambda ids, row, s: hf.NoRepeatNGramLogitsProcessor(s.request.params.no_repeat_ngram_size)(ids, row),
    )


def test_allowed_tokens_equal_those_of_transformers():
    """Catches an allowed list that lets others through."""
    check_edits(
        sequences_with(
            lambda rng: SamplingParams(allowed_token_ids=rng.sample(range(VOCAB), rng.randint(1, 9)))
        ),
        lambda ids, row, s: hf.PrefixConstrainedLogitsProcessor(
            lambda *_: list(s.request.params.allowed_token_ids), 1
        )(ids, row),
    )


def test_min_tokens_equals_that_of_transformers():
    """Catches EOS a token too early or too late; several EOS, and stop tokens, which are masked too."""
    check_edits(
        sequences_with(
            lambda rng: SamplingParams(min_tokens=rng.randrange(10), max_tokens=None, stop_token_ids=[30])
        ),
        lambda ids, row, s: hf.MinNewTokensLengthLogitsProcessor(
            s.num_prompt_tokens, s.request.params.min_tokens, [7, 9, 30]
        )(ids, row),
        eos=[7, 9],
    )


def test_presence_and_frequency_penalties_count_the_output_only():
    """Catches the prompt counted, presence counted twice, and a row that is charged for another."""

    def expected(ids, row, sequence):
        row, params = row.clone(), sequence.request.params
        output = sequence.output_token_ids
        for token in set(output):
            row[0, token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        return row

    check_edits(
        sequences_with(
            lambda rng: SamplingParams(
                presence_penalty=rng.choice([0, 0.7, -2]), frequency_penalty=rng.choice([0, 0.4, 2])
            )
        ),
        expected,
    )


def test_all_edits_together_come_in_the_stated_order():
    """Catches a penalty before the bias: repetition multiplies what the bias has moved."""
    params = SamplingParams(
        logit_bias={1: 5.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    logits = torch.tensor([[0.0, -1.0, 4.0, 1.0]])
    edited = edit_logits(logits, [make_sequence([2], [1, 1, 3], params)], ())
    assert edited.tolist() == [[0.0, 4.0 / 2 - 2 * 0.5 - 0.25, 2.0, 0.5 - 0.5 - 0.25]]


def test_a_greedy_row_obeys_masks_and_penalties():
    """Catches an argmax over the raw logits as soon as temperature is 0."""
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    for options, token in [({}, 1), ({"logit_bias": {1: -9}}, 2), ({"allowed_token_ids": [0, 3]}, 3)]:
        params = SamplingParams(temperature=0, **options)
        [sample] = Sampler()(logits, [schedule(make_sequence([0], params=params))])
        assert sample.token_ids == [token]
        assert sample.logprobs == pytest.approx([logits.log_softmax(-1)[0, token].item()])


# ---------------------------------------------------------------------------------------- randomness


def chi_square_limit(degrees):
    """The value that chi-square exceeds with odds of one in a million (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def draw(logits, keys, params=None):
    sampler = Sampler()
    scheduled = []
    for seed, position in keys:
        own = SamplingParams(seed=seed, **(params or {}))
        scheduled.append(schedule(make_sequence([1], [0] * position, own)))
    rows = logits.expand(len(keys), -1)
    return torch.tensor([sample.token_ids[0] for sample in sampler(rows, scheduled)])


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_tokens_come_with_their_probabilities(axis):
    """Catches biased noise, along neighbouring seeds and along the positions of one seed.

    20,000 draws over 12 tokens; odds of a false alarm 1e-6.
    """
    logits = torch.linspace(0, 3, 12)
    keys = [(s, 0) for s in range(20_000)] if axis == "seeds" else [(5, p) for p in range(20_000)]
    noise = gumbel_noise([noise_key(*key) for key in keys], 12, logits.device)
    tokens = (logits + noise).argmax(-1)
    assert torch.equal(tokens[:500], draw(logits, keys[:500]))
    assert chi_square(tokens.bincount(minlength=12), logits.softmax(-1)) < chi_square_limit(11)


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (-1, 1)], ids=["next seed", "next position", "diagonal"])
def test_neighbouring_draws_are_independent(other):
    """Catches a stream that runs beside its neighbour: (seed + 1, position) or (seed, position + 1).

    40,000 pairs in an 8 x 8 table against the product of uniform margins; odds of a false alarm 1e-6.
    """
    keys = [(seed, position) for seed in range(200) for position in range(200)]
    first = gumbel_noise([noise_key(s, p) for s, p in keys], 8, torch.device("cpu")).argmax(-1)
    second = gumbel_noise([noise_key(s + other[0], p + other[1]) for s, p in keys], 8, torch.device("cpu"))
    table = (first * 8 + second.argmax(-1)).bincount(minlength=64)
    assert chi_square(table, torch.full((64,), 1 / 64)) < chi_square_limit(63)


def test_keys_that_share_half_their_bits_draw_independently():
    """Catches a key of which 32 bits hardly count: streams would meet after some 65,000 draws.

    40,000 neighbouring pairs in an 8 x 8 table, for either half; odds of a false alarm 1e-6 each.
    """
    for shift in (0, 32):
        keys = [(i << shift) + (12345 << (32 - shift)) for i in range(40_001)]
        tokens = gumbel_noise(keys, 8, torch.device("cpu")).argmax(-1)
        table = (tokens[:-1] * 8 + tokens[1:]).bincount(minlength=64)
        assert chi_square(table, torch.full((64,), 1 / 64)) < chi_square_limit(63)


def test_a_seed_keeps_its_noise():
    """Catches another hash: what a user has sampled with a seed would not come again."""
    keys = [noise_key(0, 0), noise_key(1, 1 << 20)]
    assert keys == [12035550249420947055, 6377380052463995229]
    expected = torch.tensor([[-0.7337727, 1.3573385, 1.7135742], [-0.0529648, -0.7182677, 1.0507574]])
    torch.testing.assert_close(gumbel_noise(keys, 3, torch.device("cpu")), expected)


def test_every_token_of_a_large_vocabulary_gets_its_turn():
    """Catches noise that repeats along the vocabulary: 20,000 equally likely tokens in 80 buckets.

    4,800 draws; odds of a false alarm 1e-6 for each of two bucketings, neighbours and modulo 80.
    """
    keys = [noise_key(seed, 3) for seed in range(4_800)]
    draws = [gumbel_noise(keys[i : i + 50], 20_000, torch.device("cpu")) for i in range(0, 4_800, 50)]
    tokens = torch.cat([noise.argmax(-1) for noise in draws])
    uniform = torch.full((80,), 1 / 80)
    assert chi_square((tokens // 250).bincount(minlength=80), uniform) < chi_square_limit(79)
    assert chi_square((tokens % 80).bincount(minlength=80), uniform) < chi_square_limit(79)


def test_top_k_top_p_and_temperature_shape_what_is_drawn():
    """Catches a filter that is computed and not used. 6,000 draws; odds of a false alarm 1e-6."""
    logits = torch.linspace(0, 4, 20)
    options = {"temperature": 0.8, "top_k": 8, "top_p": 0.9}
    tokens = draw(logits, [(seed, 2) for seed in range(6_000)], options)
    wanted = filtered_by_transformers(logits, SamplingParams(**options)).softmax(-1)
    counts = tokens.bincount(minlength=20)
    kept = wanted > 0
    assert counts[~kept].sum() == 0
    assert chi_square(counts[kept], wanted[kept]) < chi_square_limit(int(kept.sum()) - 1)


def varied_rows(count):
    """Sequences of all kinds, some with several candidates."""
    rng = random.Random(3)
    scheduled = []
    for row in range(count):
        output = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 3, 8]))]
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        kind = rng.choice(["greedy", "random", "random", "n", "beam"])
        if kind == "beam":
            params, candidates = (
                BeamSearchParams(beam_width=rng.randint(1, 8), min_tokens=4),
                rng.randint(2, 16),
            )
        else:
            params = SamplingParams(
                n=4 if kind == "n" else 1,
                temperature=0 if kind == "greedy" else rng.choice([0.5, 1.0]),
                top_k=rng.choice([0, 20]),
                top_p=rng.choice([1.0, 0.8]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                frequency_penalty=rng.choice([0, 1.0]),
                min_tokens=rng.choice([0, 5]),
                logprobs=rng.choice([None, 0, 3]),
                seed=row,
            )
            candidates = 4 if kind == "n" and not output else 1
        scheduled.append(schedule(make_sequence(prompt, output, params), candidates))
    return scheduled


def test_a_row_does_not_depend_on_its_batch():
    """Catches rows exchanged, and randomness that depends on who else is there: each row alone again."""
    scheduled, logits, sampler = varied_rows(80), random_logits(80), Sampler(eos_token_ids=[5])
    together = sampler(logits, scheduled)
    for row, wanted in enumerate(together):
        assert sampler(logits[row : row + 1], scheduled[row : row + 1]) == [wanted]
    order = list(range(80))
    random.Random(0).shuffle(order)
    assert sampler(logits[order], [scheduled[row] for row in order]) == [together[row] for row in order]


@pytest.mark.parametrize(
    "many", [BeamSearchParams(beam_width=30), SamplingParams(seed=1, logprobs=20)], ids=["beam", "logprobs"]
)
def test_which_of_equally_likely_tokens_a_row_gets_does_not_depend_on_its_batch(many):
    """Catches `topk` asked for as many as another row wants: it takes others of equal logits then."""
    few = [BeamSearchParams(beam_width=2), *(SamplingParams(seed=2, logprobs=count) for count in (1, 5))]
    logits, sampler = random_logits(4, vocab=2000).round(), Sampler()
    scheduled = [schedule(make_sequence([1], params=p), getattr(p, "beam_width", 1)) for p in (*few, many)]
    together = sampler(logits, scheduled)
    for row, wanted in enumerate(together):
        assert sampler(logits[row : row + 1], scheduled[row : row + 1]) == [wanted]


FILTERS = [{"top_k": k, "top_p": p} for k in (10, 20, 67, 100, 500) for p in (0.5, 0.7, 0.9)]


@pytest.mark.parametrize(
    ("edit", "options"),
    [
        (torch.round, FILTERS),
        (lambda logits: logits.bfloat16().float() / 30, FILTERS),
        (lambda logits: logits / 100, [{"typical_p": 0.5}]),
    ],
    ids=["many equal logits", "some equal logits", "typical"],
)
def test_what_filters_keep_does_not_depend_on_the_batch(edit, options):
    """Catches top-p's share of a list that ends among tokens as likely as the k-th, and an entropy whose
    terms two threads share."""
    logits, own = edit(random_logits(60, vocab=50_257)), torch.get_num_threads()
    params = [SamplingParams(**o) for o in options] * (len(logits) // len(options))
    try:
        torch.set_num_threads(2)
        together = filter_logits(logits, params)
        for row, wanted in enumerate(together):
            assert torch.equal(filter_logits(logits[row : row + 1], params[row : row + 1])[0], wanted)
    finally:
        torch.set_num_threads(own)


def test_threads_do_not_share_the_only_row():
    """Catches a sum over the vocabulary in another order where PyTorch has one row for all its threads."""
    logits, own = random_logits(40, vocab=50_257) / 10, torch.get_num_threads()
    params = [SamplingParams(seed=seed, logprobs=0) for seed in range(40)]
    scheduled, sampler = [schedule(make_sequence([1], params=p)) for p in params], Sampler()
    try:
        torch.set_num_threads(2)
        together = sampler(logits, scheduled)
        for row, wanted in enumerate(together):
            assert sampler(logits[row : row + 1], scheduled[row : row + 1]) == [wanted]
        assert prompt_logprobs(logits, range(40), 1)[:1] == prompt_logprobs(logits[:1], [0], 1)
    finally:
        torch.set_num_threads(own)


def test_a_plain_greedy_row_leaves_the_others_their_settings():
    """Catches the fast path of an all-greedy batch taken when one row is greedy."""
    greedy, random = SamplingParams(temperature=0), SamplingParams(seed=1)
    logits, scheduled = (
        random_logits(2) / 10,
        [schedule(make_sequence([1], params=p)) for p in (greedy, random)],
    )
    likeliest, drawn = Sampler()(logits, scheduled)
    assert likeliest.token_ids == [logits[0].argmax().item()]
    assert drawn.token_ids == draw(logits[1:], [(1, 0)]).tolist() != [logits[1].argmax().item()]


def test_a_vocabulary_larger_than_a_pass_is_drawn_row_by_row():
    """Catches passes of zero rows, which never come to an end."""
    assert rows_at_a_time(torch.zeros(1).expand(2, DRAW_ELEMENTS["cpu"] + 1)) == 1


def test_batches_too_large_for_one_pass_are_drawn_the_same():
    """Catches rows mixed up where a large batch is cut: 60 rows of 40,000 tokens are three passes."""
    logits = random_logits(60, vocab=40_000)
    scheduled = [schedule(make_sequence([1], params=SamplingParams(n=2, seed=row)), 2) for row in range(60)]
    together = Sampler()(logits, scheduled)
    for row in (0, 25, 26, 27, 52, 59):
        assert Sampler()(logits[row : row + 1], [scheduled[row]])[0].token_ids == together[row].token_ids


def test_sampling_again_draws_the_same():
    """Catches a generator that remembers: recomputation after preemption must not change the text."""
    scheduled, logits = varied_rows(40), random_logits(40)
    sampler = Sampler()
    first = sampler(logits, scheduled)
    sampler(random_logits(40, seed=9), varied_rows(40))
    assert sampler(logits, scheduled) == first


def test_sample_i_is_a_lone_sample_with_seed_plus_i():
    """Catches n samples that share one stream, and a first step that draws otherwise than later ones."""
    logits = random_logits(1) / 10
    alone = [draw(logits, [(10 + i, 0)]).item() for i in range(5)]
    root = make_sequence([1], params=SamplingParams(n=5, seed=10))
    assert Sampler()(logits, [schedule(root, 5)])[0].token_ids == alone
    later = [make_sequence([1], [0], SamplingParams(n=5, seed=10), index=i) for i in range(5)]
    drawn = Sampler()(logits.expand(5, -1), [schedule(sequence) for sequence in later])
    assert [s.token_ids[0] for s in drawn] == draw(logits, [(10 + i, 1) for i in range(5)]).tolist()
    assert len(set(alone)) > 3


def test_noise_is_drawn_for_a_few_samples_at_a_time(monkeypatch):
    """Catches n = 256 of one prompt that takes noise for all of them at once: 375 MB with 128,000 tokens."""
    logits = random_logits(2) / 10
    scheduled = [schedule(make_sequence([1], params=SamplingParams(n=7, seed=seed)), 7) for seed in (1, 2)]
    expected = Sampler()(logits, scheduled)
    drawn = []

    def counted(keys, *more):
        drawn.append(len(keys))
        return gumbel_noise(keys, *more)

    monkeypatch.setattr("minipaged.decoding.sampling.gumbel_noise", counted)
    monkeypatch.setitem(DRAW_ELEMENTS, "cpu", 3 * VOCAB)
    assert Sampler()(logits, scheduled) == expected
    assert max(drawn) <= 3
    assert sum(drawn) == 14


def test_any_integer_is_a_seed():
    """Catches an overflow of 32 or 64 bits, and seeds of which only 32 bits count."""
    keys = [(seed, 4) for seed in (-3, 0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 + 5, 10**30)]
    assert len(set(draw(torch.zeros(1, 50_000), keys).tolist())) == len(keys)


def test_requests_without_a_seed_differ_and_a_run_can_be_repeated():
    """Catches equal texts for equal prompts, and texts that nobody can reproduce."""
    logits = random_logits(1).mul(0.1).expand(64, -1)
    scheduled = [
        schedule(make_sequence([1], params=SamplingParams(), arrival=arrival)) for arrival in range(64)
    ]
    first = Sampler(seed=1)(logits, scheduled)
    assert first == Sampler(seed=1)(logits, scheduled)
    assert first != Sampler(seed=2)(logits, scheduled)
    assert len({sample.token_ids[0] for sample in first}) > 30


# ---------------------------------------------------------------------------------------- what is reported


def test_logprobs_are_those_of_the_model_whatever_shaped_the_choice():
    """Catches log-probabilities after temperature, penalties or filters, and a cumulative sum of those."""
    scheduled, logits = varied_rows(60), random_logits(60)
    raw = logits.log_softmax(-1)
    for row, (sample, (sequence, *_)) in enumerate(
        zip(Sampler(eos_token_ids=[5])(logits, scheduled), scheduled)
    ):
        assert sample.logprobs == pytest.approx(raw[row, sample.token_ids].tolist(), abs=1e-5)
        asked = getattr(sequence.request.params, "logprobs", None)
        if asked is None:
            assert sample.top_logprobs is None
            continue
        best = raw[row].argsort(descending=True)[:asked].tolist()
        assert len(sample.top_logprobs) == len(sample.token_ids)
        for token, report in zip(sample.token_ids, sample.top_logprobs):
            assert list(report) == [token, *(other for other in best if other != token)]  # (as in vLLM)
            found, ranks = zip(*report.values())
            assert list(found) == pytest.approx(raw[row, list(report)].tolist(), abs=1e-5)
            order = raw[row].argsort(descending=True).tolist()
            assert list(ranks) == [order.index(other) + 1 for other in report]


def test_the_short_way_of_an_all_greedy_batch_says_the_same():
    """Catches a fast path that differs from the general one."""
    logits = random_logits(6)
    plain = [schedule(make_sequence([1], params=SamplingParams(temperature=0))) for _ in range(6)]
    sampled = [*plain[:5], schedule(make_sequence([1], params=SamplingParams(temperature=0, logprobs=0)))]
    for short, general in zip(Sampler()(logits, plain), Sampler()(logits, sampled)):
        assert short.token_ids == general.token_ids
        assert short.logprobs == pytest.approx(general.logprobs, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_float32(dtype):
    """Catches a log-softmax in half precision, whose sums drift."""
    logits = random_logits(3).to(dtype)
    scheduled = [
        schedule(make_sequence([1], params=SamplingParams(temperature=t, seed=1))) for t in (0, 1, 0)
    ]
    assert Sampler()(logits, scheduled) == Sampler()(logits.float(), scheduled)


def test_prompt_logprobs_of_half_precision_logits_are_those_of_float32():
    """Catches a log-softmax in half precision here, while `Sampler` has a conversion of its own."""
    logits = random_logits(3).bfloat16()
    assert prompt_logprobs(logits, [1, 2, 3], 2) == prompt_logprobs(logits.float(), [1, 2, 3], 2)


def test_a_row_that_the_model_left_without_a_token_is_not_blamed_on_parameters():
    """Catches " forbid every token; relax one of them" when every logit is -inf and nothing forbids any."""
    logits, scheduled = torch.full((1, 5), NEVER), [schedule(make_sequence([1], params=SamplingParams()))]
    (error,) = find_errors(Sampler()(logits, scheduled), scheduled, logits).values()
    assert "the model's logits are not finite" in error


@pytest.mark.parametrize("temperatures", [(1, 2), (2, 2), (2, 0.5)])
def test_beam_rows_have_temperatures_of_their_own(temperatures):
    """Catches log-probabilities divided by the sum of another temperature: they would not add up to 1."""
    logits = random_logits(2, vocab=10)
    params = [BeamSearchParams(beam_width=4, temperature=t) for t in temperatures]
    scheduled = [schedule(make_sequence([1], params=p), 10) for p in params]
    for row, sample in enumerate(Sampler()(logits, scheduled)):
        expected = (logits[row] / temperatures[row]).log_softmax(-1)
        assert sample.logprobs == pytest.approx(expected[sample.token_ids].tolist(), abs=1e-5)


def test_beam_rows_get_their_best_candidates():
    """Catches candidates that are not the best, not sorted, or more than the vocabulary has."""
    logits = random_logits(3, vocab=10)
    params = BeamSearchParams(beam_width=4, min_tokens=1)
    scheduled = [
        schedule(make_sequence([1], output, params), n) for output, n in [([], 3), ([2], 8), ([2], 99)]
    ]
    raw = logits.log_softmax(-1)
    raw[0, 7] = NEVER  # EOS, before min_tokens; the others are not scaled up, as in transformers
    for row, sample in enumerate(Sampler(eos_token_ids=[7])(logits, scheduled)):
        best = raw[row].argsort(descending=True)[: scheduled[row].num_candidates].tolist()
        assert sample.token_ids == best
        assert sample.logprobs == pytest.approx(raw[row, best].tolist(), abs=1e-5)


READS = {
    "beams": (BeamSearchParams(beam_width=4), 2),
    "random": (SamplingParams(seed=1), 2),
    "random with logprobs": (SamplingParams(seed=1, logprobs=5), 3),
}


@pytest.mark.parametrize(("params", "most"), READS.values(), ids=READS)
def test_a_step_reads_the_device_a_few_times(params, most, monkeypatch):
    """Catches a read more: on a GPU each waits until all that was launched is done. One for the tokens, one
    for whether a row has any, one for the reports."""
    reads = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda tensor, own=own, name=name: (reads.append(name), own(tensor))[1]
        )
    num_candidates = 8 if isinstance(params, BeamSearchParams) else 1
    Sampler()(random_logits(3), [schedule(make_sequence([1], params=params), num_candidates)] * 3)
    assert len(reads) <= most


class PeakMemory(TorchDispatchMode):
    """`most`: bytes of all tensors made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.most = max(self.most, sum(self._alive.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_of_random_rows_takes_more_memory_than_is_counted(dtype):
    """Catches a pool that leaves no room for sampling: the first step with top-p would fail on a full GPU."""
    logits = torch.zeros(300, 4096, dtype=dtype)
    params = SamplingParams(seed=1, top_p=0.9, top_k=3000, min_p=1e-5, typical_p=0.9, presence_penalty=0.5)
    with PeakMemory() as sampled:
        Sampler()(logits, [schedule(make_sequence([1], [2], params)) for _ in range(300)])
    with PeakMemory() as counted:
        take_memory(logits)
    assert 0.99 * sampled.most <= counted.most <= 1.1 * sampled.most


def test_prompt_logprobs_name_the_token_that_came_and_the_likeliest():
    """Catches the token reported for the wrong position, or dropped when it was unlikely."""
    logits = random_logits(4)
    raw = logits.log_softmax(-1)
    reports = prompt_logprobs(logits, [3, 9, int(raw[2].argmax()), 0], 2)
    for row, (token, report) in enumerate(zip([3, 9, int(raw[2].argmax()), 0], reports)):
        best = raw[row].argsort(descending=True)[:2].tolist()
        assert list(report) == [token, *(other for other in best if other != token)]
        assert report[token][0] == pytest.approx(raw[row, token].item(), abs=1e-5)
        assert report[token][1] == 1 + sum(raw[row] > raw[row, token])
    assert len(prompt_logprobs(logits, [3, 9, 1, 0], 0)[0]) == 1


def test_equally_likely_tokens_have_ranks_of_their_own():
    """Catches two tokens of one rank, and a likeliest token that is not the first."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    (report,) = prompt_logprobs(logits, [3], 2)
    assert sorted(rank for _, rank in report.values()) == list(range(1, len(report) + 1))
    (report,) = prompt_logprobs(logits, [3], 0)
    assert report[3][1] == 1
