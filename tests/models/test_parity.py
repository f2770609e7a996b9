"""Every supported architecture computes through the block pool what transformers computes without it.

The reference is the same model with transformers' eager attention over whole sequences. The pool starts full
of NaN, the sequences' blocks lie mixed, the batch is ragged: whole prompts, chunks and decodes together.
"""

import pytest
import torch

from tests.models.driver import CUTS, Driver, logits_in_cuts, own_logits, own_tokens, random_tokens
from tests.models.zoo import SUPPORTED, VOCAB_SIZE, build

TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("rebuilt", [False, True], ids=["as given", "rebuilt for the CPU"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_agree_at_every_position_however_the_tokens_are_cut(name: str, rebuilt: bool) -> None:
    """Catches an ignored scale, window, softcap, sink or position, and any mixing between sequences."""
    reference, driver = build(name), Driver(build(name))
    if rebuilt:
        driver.runner.optimize()
    for ids, computed in logits_in_cuts(driver, CUTS):
        expected = own_logits(reference, ids)
        assert expected.std() > 1, "weights too small: nothing would show"
        torch.testing.assert_close(computed, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("rebuilt", [False, True], ids=["as given", "rebuilt for the CPU"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_greedy_tokens_are_those_of_generate(name: str, rebuilt: bool) -> None:
    """Catches an off-by-one between sampled row, position and slot; 4 requests of different age at once."""
    reference, driver = build(name), Driver(build(name))
    if rebuilt:
        driver.runner.optimize()
    prompts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (1, 5, 9, 12)]
    num_tokens = 14
    sequences = []
    for prompt in prompts:  # one joins a step: a prompt beside decodes
        sequences.append(driver.add(prompt))
        driver.execute([(sequence, sequence.num_uncomputed_tokens) for sequence in sequences])
    while any(sequence.num_generated_tokens < num_tokens for sequence in sequences):
        driver.execute([(s, 1) for s in sequences if s.num_generated_tokens < num_tokens])
    distinct = set()
    for prompt, sequence in zip(prompts, sequences):
        assert sequence.output_token_ids == own_tokens(reference, prompt, num_tokens)
        distinct.update(sequence.output_token_ids)
    assert len(distinct) >= 12, "the model repeats itself: equal tokens would mean little"
