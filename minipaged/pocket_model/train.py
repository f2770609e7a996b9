"""Train the pocket model from scratch: `python -m minipaged.pocket_model.train`.

First comes the tokenizer, then a small Llama on an endless stream of new documents, then a test on held-out
numbers with the saved files loaded again. Seed, wall time, losses and accuracy go into training.json and the
model card.
"""

import argparse
import json
import math
import platform
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minipaged.pocket_model import PATH, corpus

CARD = Path(__file__).parent / "README.md"
FIGURES = "## Figures"  # the section that the script writes

VOCABULARY = 2048
POSITIONS = 2048
TOKENIZER_DOCUMENTS = 6000
TOKENS_PER_STEP = 4096
ROW_LENGTHS, ROW_WEIGHTS = (256, 512, 1024), (4, 4, 2)
PEAK_LEARNING_RATE, WARMUP_STEPS = 3e-3, 80
LONGEST_ANSWER = 8  # tokens, with the line break: " seven hundred seventy seven\n" is five
EXAM_BATCH = 50


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges learned from the first documents of the corpus.

    Every byte is in the vocabulary, so any text survives the round trip; each digit is a token of its own;
    a BOS is put before a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = islice(corpus.documents(seed), TOKENIZER_DOCUMENTS)
    tokenizer.train_from_iterator((re.sub(r"<\|\w+\|>", "\n", text) for text in documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A", special_tokens=[(corpus.BOS, tokenizer.token_to_id(corpus.BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=corpus.BOS,
        eos_token=corpus.EOS,
        pad_token=corpus.PAD,
        additional_special_tokens=[corpus.SYSTEM, corpus.USER, corpus.ASSISTANT],
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=corpus.CHAT_TEMPLATE,
    )


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Four Llama layers with random weights, 8 query heads over 4 KV heads, tied embeddings: 3.3 M."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        **_special_ids(tokenizer),
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Tensor]:
    """Token ids [rows, length] without end; a row is whole documents, each behind its BOS, the last cut."""
    rng = random.Random(seed)
    stream = corpus.documents(seed)
    while True:
        (length,) = rng.choices(ROW_LENGTHS, ROW_WEIGHTS)
        rows = []
        for _ in range(TOKENS_PER_STEP // length):
            row: list[int] = []
            while len(row) < length:
                row += tokenizer.encode(next(stream), add_special_tokens=False)
            rows.append(row[:length])
        yield torch.tensor(rows)


def loss_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross entropy of the next token, in nats, computed in bfloat16 where that is safe."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits  # [rows, length, VOCABULARY]
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def fit(model: LlamaForCausalLM, stream: Iterator[Tensor], steps: int) -> list[float]:
    """Train for `steps` batches of the stream; returns the loss of each step."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    losses = []
    started = time.monotonic()
    for step, ids in enumerate(islice(stream, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step:5d}  loss {losses[-1]:.3f}  {time.monotonic() - started:6.0f} s", flush=True)
    return losses


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the checkpoint: weights rounded to bfloat16, so that every dtype loads the same numbers."""
    model.generation_config = GenerationConfig(**_special_ids(tokenizer))
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # What a loader should compute in, whatever the file stores.
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, cases: Sequence[tuple[str, str]]
) -> float:
    """The share of `cases` (prompt, answer) whose answer is exactly right, from 0 to 1."""
    right = 0
    for start in range(0, len(cases), EXAM_BATCH):
        prompts, answers = zip(*cases[start : start + EXAM_BATCH])
        batch = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
        ids = batch["input_ids"]  # [batch, longest prompt]
        output = model.generate(  # type: ignore[misc]  # its declared self type fits no model
            input_ids=ids,
            attention_mask=batch["attention_mask"],
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
        )
        texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
        right += sum(corpus.first_line(text) == answer for text, answer in zip(texts, answers, strict=True))
    return right / len(cases)


def examine(directory: Path, seed: int) -> dict[str, float]:
    """Load a checkpoint as a user would and measure it on text and numbers that it was not trained on."""
    model = LlamaForCausalLM.from_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    with torch.inference_mode():
        losses = [loss_of(model, ids).item() for ids in islice(batches(tokenizer, seed + 1), 10)]
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss_on_unseen_documents": round(fmean(losses), 4),
        "accuracy_on_200_held_out_numbers": accuracy(model, tokenizer, corpus.heldout_cases()),
    }


def figures(record: Mapping[str, object]) -> str:
    """The record as the last section of the model card."""
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in record.items()]
    return "\n".join([FIGURES, "", "| figure | value |", "|---|---|", *rows, ""])


def main() -> None:
    """Train, save, examine, record."""
    parser = argparse.ArgumentParser(description="Train the pocket model on text that the project makes.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=PATH, help="where the checkpoint goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    started = time.monotonic()
    tokenizer = make_tokenizer(arguments.seed)
    model = make_model(tokenizer)
    losses = fit(model, batches(tokenizer, arguments.seed), arguments.steps)
    wall_time = time.monotonic() - started
    save(model, tokenizer, arguments.out)

    record = {
        "seed": arguments.seed,
        "steps": arguments.steps,
        "training_tokens": arguments.steps * TOKENS_PER_STEP,
        "wall_time_s": round(wall_time),
        "threads": arguments.threads,
        "machine": f"{platform.machine()} CPU, bfloat16 autocast",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "final_training_loss": round(fmean(losses[-50:]), 4),
        **examine(arguments.out, arguments.seed),
    }
    (arguments.out.parent / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if arguments.out == PATH:
        text, _, _ = CARD.read_text(encoding="utf-8").partition(FIGURES)
        CARD.write_text(text + figures(record), encoding="utf-8")
    print(figures(record))


if __name__ == "__main__":
    main()
