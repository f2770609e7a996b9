"""The pocket model's tokenizer: a byte-level BPE learned from the corpus.

Every byte is in the vocabulary, so any text survives the round trip; each digit is one token, so numbers are
read digit by digit; frequent words are one token. A BOS is put before a text. Knows nothing of models.
"""

import re
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from minipaged.pocket_model import corpus

VOCABULARY = 2048
POSITIONS = 2048


def make_tokenizer(seed: int, documents: int = 6000) -> PreTrainedTokenizerFast:
    """Learn the merges from the first `documents` documents of the corpus with this seed."""
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
    texts = (re.sub(r"<\|\w+\|>", "\n", text) for text in islice(corpus.documents(seed), documents))
    tokenizer.train_from_iterator(texts, trainer)
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
