"""A tiny Llama, and transformers' own beam search over it."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import GenerationMode


def tiny_llama(seed, vocab_size):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
        model.lm_head.weight.mul_(1.5)
    return model


@torch.no_grad()
def logits_of(model, token_lists):
    """[sequences, vocab]; equal lengths go together, for speed."""
    out = torch.empty(len(token_lists), model.config.vocab_size)
    for length in {len(tokens) for tokens in token_lists}:
        rows = [row for row, tokens in enumerate(token_lists) if len(tokens) == length]
        ids = torch.tensor([token_lists[row] for row in rows])
        out[rows] = model(ids, use_cache=False).logits[:, -1]
    return out


def likely_tokens(model):
    """Tokens that beams will meet: EOS must be reachable."""
    vocab_size = model.config.vocab_size
    ids = torch.arange(vocab_size).repeat(2, 1).T
    mean = logits_of(model, ids.tolist()).softmax(-1).mean(0)
    return mean.argsort(descending=True).tolist()


def hf_beam_search(model, prompt, eos, monkeypatch, **options):
    """[(output token ids, score)], the best first."""
    config = GenerationConfig(
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    # With one beam, transformers would run its greedy search, which knows no scores.
    monkeypatch.setattr(GenerationConfig, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    results = []
    for sequence, indices, score in zip(out.sequences, out.beam_indices, out.sequences_scores):
        length = int((indices >= 0).sum())
        results.append((sequence[len(prompt) :][:length].tolist(), score.item()))
    return results
