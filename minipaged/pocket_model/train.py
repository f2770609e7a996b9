"""Make the pocket model from nothing: `python -m minipaged.pocket_model.train`.

Tokenizer first, then a small Llama on an endless stream of fresh documents, then the exam on held-out
numbers with the saved files loaded again. Seed, wall time, losses and accuracy go to training.json and into
the model card. Knows nothing of paged attention.
"""

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from minipaged.pocket_model import PATH, corpus, exam
from minipaged.pocket_model.tokenizer import POSITIONS, VOCABULARY, make_tokenizer

CARD = Path(__file__).parent / "README.md"
FIGURES = "## Figures"  # the section that the script writes

TOKENS_PER_STEP = 4096
ROW_LENGTHS, ROW_WEIGHTS = (512, 1024), (4, 1)
PEAK_LEARNING_RATE, WARMUP_STEPS = 3e-3, 50


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
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Batch(NamedTuple):
    """Packed documents: token ids and their positions, which start again at 0 with each document."""

    ids: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Batches of TOKENS_PER_STEP tokens without end; a row is whole documents, the last one cut."""
    rng = random.Random(seed)
    stream = corpus.documents(seed)
    while True:
        (length,) = rng.choices(ROW_LENGTHS, ROW_WEIGHTS)
        ids, positions = [], []
        for _ in range(TOKENS_PER_STEP // length):
            row: list[int] = []
            places: list[int] = []
            while len(row) < length:
                document = tokenizer.encode(next(stream), add_special_tokens=False)
                row += document
                places += range(len(document))
            ids.append(row[:length])
            positions.append(places[:length])
        yield Batch(torch.tensor(ids), torch.tensor(positions))


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross entropy of the next token, in nats, computed in bfloat16 where that is safe.

    transformers sees from the positions where a document starts, and lets no token look into the one before.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
    logits = output.logits[:, :-1].flatten(0, 1).float()  # [rows * (length - 1), VOCABULARY]
    # Which document comes after an EOS is not to be guessed.
    following = batch.ids[:, 1:].masked_fill(batch.positions[:, 1:] == 0, -100)
    return functional.cross_entropy(logits, following.flatten(), ignore_index=-100)


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def fit(model: LlamaForCausalLM, stream: Iterator[Batch], steps: int) -> list[float]:
    """Train for `steps` batches of the stream; returns the loss of each step."""
    # Muon for the matrices inside the layers, AdamW for the embedding and the norms.
    inner = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in inner}
    outer = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers = [
        torch.optim.Muon(inner, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    losses = []
    started = time.monotonic()
    for step, batch in enumerate(islice(stream, steps)):
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step:5d}  loss {losses[-1]:.3f}  {time.monotonic() - started:6.0f} s", flush=True)
    return losses


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the checkpoint: weights rounded to bfloat16, so that every dtype loads the same numbers."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.bfloat16().save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(directory)
    # What a loader should compute in, whatever the file stores.
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def examine(directory: Path, seed: int) -> dict[str, float]:
    """Load a checkpoint as a user would and measure it on text and numbers that it was not trained on."""
    model = LlamaForCausalLM.from_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    with torch.inference_mode():
        losses = [loss_of(model, batch).item() for batch in islice(batches(tokenizer, seed + 1), 10)]
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss_on_unseen_documents": round(fmean(losses), 4),
        "accuracy_on_200_held_out_numbers": exam.accuracy(model, tokenizer, corpus.heldout_cases()),
    }


def figures(record: Mapping[str, object]) -> str:
    """The record as the last section of the model card."""
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in record.items()]
    return "\n".join([FIGURES, "", "| figure | value |", "|---|---|", *rows, ""])


def main() -> None:
    """Train, save, examine, record."""
    parser = argparse.ArgumentParser(description="Train the pocket model on text that the project makes.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=700)
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
    (arguments.out.parent / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    if arguments.out == PATH:
        text, _, _ = CARD.read_text().partition(FIGURES)
        CARD.write_text(text + figures(record))
    print(figures(record))


if __name__ == "__main__":
    main()
