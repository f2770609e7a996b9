"""The embedded model: a small Llama, its tokenizer, and everything that made them.

`PATH` is the checkpoint directory, for `LLM(model=...)` or `AutoModelForCausalLM.from_pretrained`.
Importing this loads no torch.
"""

from pathlib import Path

PATH: Path = Path(__file__).parent / "checkpoint"

__all__ = ["PATH"]
