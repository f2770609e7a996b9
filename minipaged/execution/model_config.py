"""What a model's configuration says: which tokens end a text, how to sample, how long a sequence may be."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from minipaged.config import ConfigError
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.checkpoints import ModelLoadError


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder, even if it is part of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def end_of_text(model: PreTrainedModel, vocab_size: int, tokenizer: Any = None) -> tuple[int, ...]:
    """Token ids that end a text, as `generate` of transformers sees them, and the tokenizer's EOS.

    Files may name more than the model can generate, or -1. Raises ModelLoadError for what is not a token id.
    """
    ends: list[int] = []
    for config in (getattr(model, "generation_config", None), text_config(model)):
        if not ends and (eos := getattr(config, "eos_token_id", None)) is not None:
            ends += eos if isinstance(eos, list) else [eos]
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is not None and eos not in ends:
        ends.append(eos)
    for token in ends:
        if not isinstance(token, int):
            raise ModelLoadError(
                f"eos_token_id is {token!r}; give an int or a list of ints in generation_config.json"
            )
    return tuple(token for token in ends if 0 <= token < vocab_size)


SAMPLING_DEFAULTS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")},
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json -> field of `SamplingParams`."""


def recommended_sampling(model: PreTrainedModel) -> dict[str, Any]:
    """What the model's generation_config.json recommends, as fields of `SamplingParams`."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    fields = config.to_diff_dict()
    return {own: fields[name] for name, own in SAMPLING_DEFAULTS.items() if fields.get(name) is not None}


def trained_length(config: Any) -> int | None:
    """The context length in a text configuration, also in MPT's and BLOOM's."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    return next((length for name in names if (length := getattr(config, name, None)) is not None), None)


def longest_sequence(config: Any, max_model_len: int | None) -> int:
    """The length limit: that of the model's text configuration, or the shorter `max_model_len`.

    Raises:
        ConfigError: `max_model_len` is longer than the model supports, or neither sets a limit.
        UnsupportedModelError: no positions, or rotary embeddings that depend on the step's other requests.
    """
    trained = trained_length(config)
    longest = max_model_len or trained
    if longest is None:
        raise ConfigError(f"max_model_len is None and {config.model_type} gives no limit; set max_model_len")
    if trained is not None and trained < 1:
        raise UnsupportedModelError(f"it was trained for {trained} positions; give at least 1")
    if trained is not None and longest > trained:
        raise ConfigError(
            f"max_model_len is {longest}; the model was trained for {trained} positions; "
            f"give at most {trained}"
        )
    # Two rope types switch frequencies when the longest position *of the forward pass* crosses a length: the
    # tokens of one request would depend on the others. Below that length they are plain.
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer = parameters.values() if all(isinstance(p, dict) for p in parameters.values()) else [parameters]
    limits = []
    for rope in per_layer:
        kind = rope.get("rope_type", "default")
        if kind == "longrope" or "dynamic" in kind:
            limits.append((rope.get("original_max_position_embeddings") or trained or 0, kind))
    if limits:
        exact, kind = min(limits)
        if longest > exact:
            raise UnsupportedModelError(
                f"its rope type {kind!r} depends on the longest request of a step; it is exact up to "
                f"{exact} positions: set max_model_len to {exact} or less"
            )
    return longest
