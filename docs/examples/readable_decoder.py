"""A Llama decoder over paged keys and values, to be read: one sequence, plain PyTorch, nothing made fast.

    python docs/examples/readable_decoder.py        # follow one token through it

Only the bookkeeping of blocks is the engine's own: `BlockAllocator` and `BlockTable`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from minipaged.memory import BlockAllocator, BlockTable

POCKET_MODEL = Path(__file__).parents[2] / "minipaged/pocket_model/checkpoint"


class Decoder:
    """A Llama and a pool for its keys and values.

    T tokens are computed at once; E hidden size, Hq query heads, Hkv key/value heads, D head size.
    """

    def __init__(self, folder: Path, num_blocks: int, block_size: int) -> None:
        self.config = config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in stored.items()}
        self.head_dim, self.num_kv_heads = config["head_dim"], config["num_key_value_heads"]
        # Never-written slots are NaN: reading one by mistake would spoil every logit.
        shape = (config["num_hidden_layers"], num_blocks, block_size, self.num_kv_heads, self.head_dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)

    def linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        """Multiply [T, in] with a weight matrix of a layer."""
        return x @ self.weights[f"model.layers.{layer}.{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Scale each row to a root mean square of 1, then each feature by its weight."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"model.{name}.weight"]

    def embed(self, token_ids: list[int]) -> Tensor:
        """One row per token: [T, E]."""
        return self.weights["model.embed_tokens.weight"][token_ids]

    def project(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, Hq, D], key and value [T, Hkv, D] of the tokens; positions [T] int64."""
        x = self.norm(x, f"layers.{layer}.input_layernorm")
        query, key, value = (
            self.linear(x, layer, f"self_attn.{name}_proj").unflatten(-1, (-1, self.head_dim))
            for name in "qkv"
        )
        return self.rotate(query, positions), self.rotate(key, positions), value

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn the pairs (i, i + D/2) of each head by position x theta^(-2i/D): rotary embedding."""
        half = self.head_dim // 2
        frequencies = self.config["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        angle = positions[:, None, None] * frequencies  # [T, 1, D/2], the same for every head
        cos, sin = angle.cos(), angle.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def write(self, layer: int, key: Tensor, value: Tensor, slots: list[int]) -> None:
        """Put K and V of each token into its slot, block x block size + offset."""
        self.keys[layer].flatten(0, 1)[slots] = key
        self.values[layer].flatten(0, 1)[slots] = value

    def weigh(self, layer: int, query: Tensor, table: BlockTable, positions: Tensor) -> Tensor:
        """How much each token looks at each token before it: [Hq, T, context], rows sum to 1."""
        key = self.keys[layer][table.blocks].flatten(0, 1)[: table.num_tokens]  # [context, Hkv, D]
        key = key.repeat_interleave(query.shape[1] // self.num_kv_heads, dim=1)  # one per query head
        scores = torch.einsum("thd,chd->htc", query, key) / self.head_dim**0.5
        future = torch.arange(table.num_tokens) > positions[:, None]
        return scores.masked_fill(future, -torch.inf).softmax(-1)

    def attend(self, layer: int, query: Tensor, table: BlockTable, positions: Tensor) -> Tensor:
        """The values of the context, mixed by the weights: [T, E]."""
        weights = self.weigh(layer, query, table, positions)
        value = self.values[layer][table.blocks].flatten(0, 1)[: table.num_tokens]
        value = value.repeat_interleave(query.shape[1] // self.num_kv_heads, dim=1)
        return torch.einsum("htc,chd->thd", weights, value).flatten(1)

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        """Each token on its own: [T, E] to the wider intermediate size, gated, and back."""
        x = self.norm(x, f"layers.{layer}.post_attention_layernorm")
        gate, up = (self.linear(x, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(torch.nn.functional.silu(gate) * up, layer, "mlp.down_proj")

    def forward(self, token_ids: list[int], table: BlockTable) -> Tensor:
        """Logits [T, vocabulary] of the next T tokens of a sequence; the table gives them their slots."""
        start = table.num_tokens
        table.append(len(token_ids))
        positions = torch.arange(start, table.num_tokens)
        slots = table.slots(start, table.num_tokens)
        x = self.embed(token_ids)
        for layer in range(self.config["num_hidden_layers"]):
            query, key, value = self.project(x, layer, positions)
            self.write(layer, key, value, slots)
            attended = self.attend(layer, query, table, positions)
            x = x + self.linear(attended, layer, "self_attn.o_proj")
            x = x + self.mlp(x, layer)
        return self.norm(x, "norm") @ self.weights["model.embed_tokens.weight"].T

    def generate(self, token_ids: list[int], table: BlockTable, num_tokens: int) -> list[int]:
        """Greedy decoding: the prompt in one call, then one token per call."""
        generated = [int(self.forward(token_ids, table)[-1].argmax())]
        while len(generated) < num_tokens:
            generated.append(int(self.forward(generated[-1:], table)[-1].argmax()))
        return generated


def follow_one_token() -> None:
    """Print what becomes of the last token of a prompt, first at the first layer, then at the end."""
    tokenizer = Tokenizer.from_file(str(POCKET_MODEL / "tokenizer.json"))
    decoder = Decoder(POCKET_MODEL, num_blocks=8, block_size=4)
    allocator = BlockAllocator(8, order=[7, 1, 3, 6, 0])  # a pool whose free blocks do not lie in order

    token_ids = tokenizer.encode("The little robot found a").ids
    print("token ids", token_ids, "the last is", repr(tokenizer.decode(token_ids[-1:])))

    x = decoder.embed(token_ids)
    print("x", list(x.shape), "last row", numbers(x[-1]))

    table = BlockTable(allocator, block_size=4)
    table.append(len(token_ids))
    positions = torch.arange(len(token_ids))
    query, key, value = decoder.project(x, 0, positions)
    print("query", list(query.shape), "key", list(key.shape), "value", list(value.shape))
    print("last key, head 0", numbers(key[-1, 0]))

    slots = table.slots(0, table.num_tokens)
    decoder.write(0, key, value, slots)
    print("blocks", table.blocks, "slots", slots)
    print("pool, layer 0, slot", slots[-1], numbers(decoder.keys[0].flatten(0, 1)[slots[-1], 0]))

    weights = decoder.weigh(0, query, table, positions)
    print("weights", list(weights.shape), "last token, head 0:", *(f"{w:.2f}" for w in weights[0, -1]))

    attended = decoder.attend(0, query, table, positions)
    x = x + decoder.linear(attended, 0, "self_attn.o_proj")
    x = x + decoder.mlp(x, 0)
    print("x", list(x.shape), "last row", numbers(x[-1]))

    table.free()
    logits = decoder.forward(token_ids, table)
    best = logits[-1].softmax(-1).topk(3)
    print("logits", list(logits.shape))
    for probability, token in zip(best.values, best.indices):
        print(f"  {probability:.2f} {tokenizer.decode([int(token)])!r}")

    table.free()
    generated = decoder.generate(token_ids, table, num_tokens=12)
    print("tokens", table.num_tokens, "in blocks", table.blocks)
    print(tokenizer.decode(token_ids + generated))


def numbers(row: Tensor) -> str:
    """The first few numbers of a row."""
    return " ".join(f"{value:.2f}" for value in row[:4]) + " ..."


if __name__ == "__main__":
    follow_one_token()
