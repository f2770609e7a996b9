"""The embedded model: a small Llama, its tokenizer, and everything that made them.

`PATH` is the checkpoint directory, for `AutoModelForCausalLM.from_pretrained`; `NAME` is what a server
calls it. `LLM(model=...)` takes both.
Importing this loads no torch.
"""

from pathlib import Path

PATH: Path = Path(__file__).parent / "checkpoint"

NAME = "pocket"

__all__ = ["NAME", "PATH", "located"]


def located(model: str | Path | None) -> str:
    """Where a model is: `PATH` for None, and for `NAME` unless there is a folder of this name."""
    is_embedded = model is None or (model == NAME and not Path(NAME).exists())
    return str(PATH if is_embedded else model)
