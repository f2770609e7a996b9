"""How well a model knows its numbers: greedy answers through `transformers.generate`, in batches.

Knows nothing of paged attention; the engine is examined on the same cases by its own tests.
"""

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from minipaged.pocket_model.corpus import first_line

LONGEST_ANSWER = 8  # tokens, with the line break: " seven hundred seventy seven\n" is five


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int = 50
) -> list[str]:
    """The first line of the greedy completion of each prompt, in order."""
    found: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            list(prompts[start : start + batch_size]), padding=True, padding_side="left", return_tensors="pt"
        )
        output = model.generate(  # type: ignore[misc]  # its declared self type fits no model
            input_ids=batch["input_ids"],  # [batch, longest prompt]
            attention_mask=batch["attention_mask"],
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
        )
        completions = output[:, batch["input_ids"].shape[1] :]  # [batch, <= LONGEST_ANSWER]
        found += [first_line(text) for text in tokenizer.batch_decode(completions, skip_special_tokens=True)]
    return found


def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, cases: Sequence[tuple[str, str]]
) -> float:
    """The share of `cases` (prompt, answer) whose answer is exactly right, from 0 to 1."""
    given = answers(model, tokenizer, [prompt for prompt, _ in cases])
    return sum(got == answer for got, (_, answer) in zip(given, cases, strict=True)) / len(cases)
