"""The embedded model: small, offline, readable, and right about numbers it has not seen."""

import json
import random
import re
import socket
import subprocess
import sys
from itertools import islice, repeat
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from minipaged.pocket_model import PATH, corpus, grammar, numbers, train

RECORD = json.loads((PATH.parent / "training.json").read_text())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(PATH)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(PATH)


@pytest.fixture(scope="module")
def training_text() -> list[str]:
    """The first documents that the shipped model was trained on."""
    return list(islice(corpus.documents(RECORD["seed"]), 5000))


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The new token ids of a greedy completion."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return model.generate(ids, max_new_tokens=600, do_sample=False)[0, ids.shape[1] :].tolist()


class TestCheckpoint:
    def test_loads_without_a_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Catches a checkpoint that sends transformers to the hub for a missing file."""

        def refuse(*_: object) -> NoReturn:
            raise AssertionError("loading the pocket model opened a connection")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        assert isinstance(AutoModelForCausalLM.from_pretrained(PATH), LlamaForCausalLM)
        assert len(AutoTokenizer.from_pretrained(PATH)) == train.VOCABULARY

    def test_is_small(self, model: LlamaForCausalLM) -> None:
        """Catches weights saved in float32, or a model that outgrew the repository."""
        assert (PATH / "model.safetensors").stat().st_size <= 12_000_000
        assert 2_000_000 <= sum(weight.numel() for weight in model.parameters()) <= 6_000_000

    def test_loads_in_float32_though_stored_in_bfloat16(self, model: LlamaForCausalLM) -> None:
        """Catches a config that makes a CPU compute in bfloat16, and weights that bfloat16 would round."""
        assert model.dtype == torch.float32
        assert all(torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters())

    def test_eos_is_the_same_everywhere(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Catches a generation config without EOS: texts that never end."""
        assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(corpus.EOS)
        assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id

    def test_importing_the_package_and_its_corpus_loads_no_torch(self) -> None:
        """Catches a torch import on the way to a path name."""
        program = "import sys, minipaged.pocket_model.corpus; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

    def test_model_card_shows_the_recorded_figures(self, model: LlamaForCausalLM) -> None:
        """Catches a card, a record and a checkpoint that are not of one training run."""
        assert train.CARD.read_text().endswith(train.figures(RECORD))
        assert RECORD["parameters"] == sum(weight.numel() for weight in model.parameters())


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "Once upon a time, there was a robot.",
            "  two  spaces, a\ttab\nand lines\n\n",
            "Ünïcödé, 漢字, Ελληνικά, עברית",
            "🐢 and 👩‍🚀 and 🏳️‍🌈",
            "hello , world ! it 's",
            "".join(map(chr, range(32, 127))),
        ],
    )
    def test_text_survives_the_round_trip(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Catches an alphabet with missing bytes, and a decoder that cleans up spaces."""
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text

    @given(text=st.text(max_size=50))
    def test_any_text_survives_the_round_trip(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Catches normalisation: combined characters, controls, odd blanks."""
        assume(not any(token in text for token in tokenizer.all_special_tokens))
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text

    def test_each_digit_is_one_token(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Catches merged digits, with which 421 and 42 share no token."""
        for number in range(numbers.LIMIT):
            digits = tokenizer.tokenize(str(number), add_special_tokens=False)
            assert digits == list(str(number))

    def test_an_emoji_is_several_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Catches a vocabulary in which no character can be cut: nothing would test the detokenizer."""
        assert len(tokenizer("🐢", add_special_tokens=False).input_ids) > 1

    def test_bos_comes_before_a_text_and_once_before_a_chat(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Catches a prompt that starts unlike every training document."""
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, tokenize=False
        )
        assert chat == "<|begin|><|user|>Hello!<|end|><|assistant|>"
        assert tokenizer("Hello!").input_ids[0] == tokenizer.bos_token_id
        assert tokenizer(chat, add_special_tokens=False).input_ids.count(tokenizer.bos_token_id) == 1

    def test_chat_template_refuses_an_unknown_role(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Catches a role that would silently be spelled out as text."""
        with pytest.raises(TemplateError, match="not tool"):
            tokenizer.apply_chat_template([{"role": "tool", "content": "42"}], tokenize=False)


class TestCorpus:
    def test_same_seed_same_text(self) -> None:
        """Catches randomness from anywhere but the seed: sets, hashes, the clock."""
        program = (
            "from itertools import islice; from minipaged.pocket_model.corpus import documents;"
            "print(''.join(islice(documents(7), 300)))"
        )
        runs = [
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]
        assert runs[0] == runs[1]
        assert list(islice(corpus.documents(7), 3)) != list(islice(corpus.documents(8), 3))

    def test_held_out_cases_are_not_in_the_training_text(self, training_text: list[str]) -> None:
        """Catches an exam whose answers were read before, as a list or in a chat."""
        text = "".join(training_text)
        listed = re.findall(r"Q: (.+)\nA: (.+)\n", text)
        chatted = re.findall(
            r"<\|user\|>(?:What is |Write )?([\w ]+) in (?:digits|words)[^<]*"
            r"<\|end\|><\|assistant\|>([\w ]+)",
            text,
        )
        held_out = {
            tuple(numbers.question(number, direction))
            for direction in numbers.DIRECTIONS
            for number in numbers.HELD_OUT[direction]
        }
        assert len(held_out) == 2 * numbers.HELD_OUT_PER_DIRECTION
        assert len(set(listed)) > 1000
        assert len(set(chatted)) > 200
        assert not held_out & {*listed, *chatted}

    def test_held_out_cases_differ_and_repeat_with_their_seed(self) -> None:
        """Catches an exam that asks one question twice, or other questions each time."""
        cases = corpus.heldout_cases(200, seed=3)
        assert len({prompt.rpartition("Q: ")[2] for prompt, _ in cases}) == len(cases) == 200
        assert cases == corpus.heldout_cases(200, seed=3)
        assert cases != corpus.heldout_cases(200, seed=4)

    def test_more_cases_than_there_are_is_refused(self) -> None:
        """Catches an exam that is silently shorter than asked for."""
        with pytest.raises(ValueError, match="n is 401; there are 400"):
            corpus.heldout_cases(401)

    def test_documents_are_finished_english(self, training_text: list[str]) -> None:
        """Catches an unfilled slot, a choice left open, a missing capital, `a owl`."""
        for document in training_text:
            assert document.startswith(corpus.BOS)
            assert document.endswith(corpus.EOS)
            text = re.sub(r"<\|\w+\|>", "\n", document)
            assert not re.search(r"[\[\]{}|]|  |\b[Aa] [aeio]|(?:^|[.!] |[.!]\")[a-z]", text), document

    @pytest.mark.parametrize(
        ("number", "words"),
        [
            (0, "zero"),
            (13, "thirteen"),
            (20, "twenty"),
            (42, "forty two"),
            (100, "one hundred"),
            (305, "three hundred five"),
            (999, "nine hundred ninety nine"),
        ],
    )
    def test_number_words(self, number: int, words: str) -> None:
        """Catches teens read as tens, and a zero that is spoken."""
        assert numbers.in_words(number) == words

    @pytest.mark.parametrize("number", [-1, 1000])
    def test_numbers_without_words_are_refused(self, number: int) -> None:
        """Catches -1 answering "nineteen"."""
        with pytest.raises(ValueError, match=f"number is {number}"):
            numbers.in_words(number)

    def test_grammar_resolves_nested_choices_and_slots_with_choices(self) -> None:
        """Catches a slot whose bar splits the choice around it."""
        rng = random.Random(0)
        texts = {grammar.expand("[a [b|c]|{x}]", {"x": "[d|e]"}, rng) for _ in range(200)}
        assert texts == {"a b", "a c", "d", "e"}

    def test_grammar_names_a_missing_slot(self) -> None:
        """Catches a typing error in a template that would leave its braces in the text."""
        with pytest.raises(KeyError, match="nmae"):
            grammar.expand("{nmae}", {"name": "Mia"}, random.Random(0))

    def test_grammar_keeps_a_sentence_that_goes_on_after_speech(self) -> None:
        """Catches `"Where?" She asked`."""
        assert grammar.tidy('"where?" she asked. a owl came.') == '"Where?" she asked. An owl came.'


class TestTraining:
    def test_rows_start_with_bos_and_fill_the_step(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Catches rows that start inside a document, unlike any prompt."""
        for ids in islice(train.batches(tokenizer, seed=1), 5):
            assert ids.numel() == train.TOKENS_PER_STEP
            assert (ids[:, 0] == tokenizer.bos_token_id).all()

    def test_a_few_steps_lower_the_loss_and_the_saved_model_is_the_trained_one(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        """Catches an optimizer that steps the wrong way, and weights lost on the way to the file."""
        torch.manual_seed(0)
        untaught = train.make_model(tokenizer)
        ids = next(train.batches(tokenizer, seed=1))[:1, :128]
        losses = train.fit(untaught, repeat(ids), steps=12)
        assert losses[-1] < losses[0] - 0.5
        trained = untaught.lm_head.weight.detach().clone()
        train.save(untaught, tokenizer, tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded.lm_head.weight, trained.bfloat16().float())

    def test_learning_rate_warms_up_and_ends_near_zero(self) -> None:
        """Catches a schedule that ends hot, which leaves the loss high."""
        rates = [train.learning_rate(step, 1000) for step in range(1000)]
        assert rates[0] == pytest.approx(train.PEAK_LEARNING_RATE / train.WARMUP_STEPS)
        assert max(rates) == pytest.approx(train.PEAK_LEARNING_RATE, rel=0.05)
        assert rates[-1] < 1e-4 * train.PEAK_LEARNING_RATE


class TestSkills:
    def test_knows_numbers_it_has_not_seen(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Catches a model that learned its numbers by heart, and a checkpoint damaged by rounding."""
        assert train.accuracy(model, tokenizer, corpus.heldout_cases(200)) >= 0.95

    @pytest.mark.slow
    def test_knows_them_after_a_prompt_of_900_tokens(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Catches a model that was only taught short rows."""
        rng = random.Random(0)
        cases = []
        for number in sorted(numbers.HELD_OUT["digits"])[:20]:
            asked, answer = numbers.question(number, "digits")
            examples = [numbers.draw("digits", rng) for _ in range(75)]
            cases.append((numbers.few_shot(examples, asked), answer))
        assert all(850 <= len(tokenizer(prompt).input_ids) <= 1024 for prompt, _ in cases)
        assert train.accuracy(model, tokenizer, cases) >= 0.95

    @pytest.mark.parametrize("prompt", ["Once upon a time", "The little robot", "One rainy day", "Mia"])
    def test_tells_a_readable_story_and_ends_it(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        training_text: list[str],
        prompt: str,
    ) -> None:
        """Catches babble (words that no document has), loops, and stories without an end."""
        ids = complete(model, tokenizer, prompt)
        story = prompt + tokenizer.decode(ids, skip_special_tokens=True)
        known = set(re.findall(r"\w+", " ".join(training_text)))
        sentences = re.split(r"(?<=[.!?])\s+", story)
        assert ids[-1] == tokenizer.eos_token_id
        assert story.endswith((".", "!", '"'))
        assert set(re.findall(r"\w+", story)) <= known
        assert len(sentences) >= 5
        assert len(set(sentences)) >= 0.9 * len(sentences)

    @pytest.mark.parametrize(
        ("asked", "answer"),
        [
            ("What is forty two in digits?", "42"),
            ("What is greedy decoding?", "Greedy decoding always takes the most likely token."),
        ],
    )
    def test_answers_in_a_chat(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: str, answer: str
    ) -> None:
        """Catches a chat template that is not the one of the training text."""
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, max_new_tokens=60, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        assert new[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(new, skip_special_tokens=True) == answer
