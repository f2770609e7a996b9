"""How well a model knows its numbers: greedy answers through `transformers.generate`, in batches.

The engine is examined on the same cases by its own tests.
"""

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from minipaged.pocket_model.corpus import first_line

LONGEST_ANSWER = 8  # tokens, with the line break: " seven hundred seventy seven\n" is five
BATCH = 50


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, cases: Sequence[tuple[str, str]]
) -> float:
    """The share of `cases` (prompt, answer) whose answer is exactly right, from 0 to 1."""
    right = 0
    for start in range(0, len(cases), BATCH):
        prompts, answers = zip(*cases[start : start + BATCH])
        batch = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
        ids = batch["input_ids"]  # [batch, longest prompt]
        output = model.generate(  # type: ignore[misc]  # its declared self type fits no model
            input_ids=ids,
            attention_mask=batch["attention_mask"],
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
        )
        texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
        right += sum(first_line(text) == answer for text, answer in zip(texts, answers, strict=True))
    return right / len(cases)
