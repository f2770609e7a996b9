"""Small random models whose heads four ranks can share. Neither their vocabulary (the pocket model's and one
token more) nor their MLPs divide evenly."""

from tests.models.zoo import build

EOS = 1
SIZES = {
    "vocab_size": 2049,
    "hidden_size": 64,
    "intermediate_size": 50,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "eos_token_id": EOS,
}
MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral_sliding": {},
    "gemma2": {"tie_word_embeddings": True},
    "mixtral": {"intermediate_size": 48},
}


def save_models(folder):
    """Write each model to a directory of its name."""
    for name, changes in MODELS.items():
        build(name, **{**SIZES, **changes}).save_pretrained(folder / name)
