"""Every supported architecture computes through the block pool what transformers computes without it.

The reference is the same model with transformers' eager attention over whole sequences. The pool starts full
of NaN, the sequences' blocks lie mixed, the batch is ragged: whole prompts, chunks and decodes together.
"""

import pytest
import torch
from torch import nn

from tests.models.driver import Driver, logits_in_cuts, random_tokens
from tests.models.zoo import SUPPORTED, VOCAB_SIZE, build

TOLERANCE = 1e-4

# From which step on a sequence is computed, and in which pieces: the cuts fall before, on and after the ends
# of blocks of 4, of windows of 5 to 7 and of attention chunks of 8.
CUTS = [
    (0, [3, 2, 5, 1, 1, 1, 1, 7]),  # chunks, decodes, and a chunk again (recompute after preemption)
    (1, [14, 1, 1, 1, 1, 1]),  # a whole prompt, then decodes
    (2, [4, 1, 1, 6, 13]),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@torch.inference_mode()
def expected_logits(reference: nn.Module, token_ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("rebuilt", [False, True], ids=["as given", "rebuilt for the CPU"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_agree_at_every_position_however_the_tokens_are_cut(name: str, rebuilt: bool) -> None:
    """Catches an ignored scale, window, softcap, sink or position, and any mixing between sequences."""
    reference, driver = build(name), Driver(build(name))
    if rebuilt:
        driver.runner.optimize()
    for ids, computed in logits_in_cuts(driver, CUTS):
        expected = expected_logits(reference, ids)
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
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
        )
        assert sequence.token_ids.tolist() == generated[0].tolist()
        distinct.update(sequence.output_token_ids)
    assert len(distinct) >= 12, "the model repeats itself: equal tokens would mean little"
