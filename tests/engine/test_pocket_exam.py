"""The embedded model does its task through this engine: number words <-> digits it never saw in training."""

from __future__ import annotations

from minipaged import LLM, SamplingParams
from minipaged.pocket_model.corpus import first_line, heldout_cases


def test_at_least_95_percent_of_200_held_out_numbers_are_right():
    """An engine whose texts look fine and whose attention is slightly wrong."""
    cases = heldout_cases(200)
    llm = LLM(num_blocks=512, max_num_seqs=64, disable_log_stats=True)
    outputs = llm.generate(
        [prompt for prompt, _ in cases], SamplingParams(temperature=0, max_tokens=16, stop=("\n",))
    )
    right = sum(first_line(o.outputs[0].text) == answer for o, (_, answer) in zip(outputs, cases))
    assert right >= 190
    llm.engine.check_invariants()
