"""The training text of the pocket model, generated from a seed, and the cases it is tested on.

An endless stream of four kinds of documents: stories, facts, number questions, and chats about all three.
Nothing is downloaded and nothing is quoted; every sentence comes from the templates in text/.
"""

import random
from collections.abc import Iterator

from minipaged.pocket_model import facts, numbers, stories

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant, not ' + message.role) }}"
    "{% endif %}"
    "<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def documents(seed: int) -> Iterator[str]:
    """Training documents without end, each with its BOS and EOS: the same ones for the same seed."""
    rng = random.Random(seed)
    kinds = [stories.story, numbers.document, _chat, facts.document]
    while True:
        document = rng.choices(kinds, weights=[50, 18, 22, 10])[0]
        yield f"{BOS}{document(rng)}{EOS}"


def heldout_cases(n: int = 200, seed: int = 0) -> list[tuple[str, str]]:
    """`n` different (prompt, answer) pairs that the training text does not hold, half in each direction.

    A prompt shows four examples from the training numbers, then asks. A completion is right if its
    `first_line` is the answer.

    Raises ValueError if `n` is more than there is.
    """
    if not 0 <= n <= 2 * numbers.HELD_OUT_PER_DIRECTION:
        raise ValueError(f"n is {n}; there are {2 * numbers.HELD_OUT_PER_DIRECTION} held-out cases")
    rng = random.Random(f"cases {seed}")
    cases = []
    for direction, count in zip(numbers.DIRECTIONS, ((n + 1) // 2, n // 2), strict=True):
        for number in rng.sample(sorted(numbers.HELD_OUT[direction]), count):
            examples = [numbers.draw(direction, rng) for _ in range(4)]
            asked, answer = numbers.question(number, direction)
            cases.append((numbers.few_shot(examples, asked), answer))
    return cases


def first_line(completion: str) -> str:
    """The answer in a completion: the text up to the first line break, without spaces around it."""
    return completion.partition("\n")[0].strip()


def _chat(rng: random.Random) -> str:
    text = ""
    if rng.random() < 0.25:
        text += f"{SYSTEM}{rng.choice(facts.SYSTEM_PROMPTS)}{EOS}"
    for turn in range(rng.choice([1, 1, 2, 3])):
        asked, answer = _exchange(rng, greet=turn == 0)
        text += f"{EOS if turn else ''}{USER}{asked}{EOS}{ASSISTANT}{answer}"
    return text


def _exchange(rng: random.Random, greet: bool) -> tuple[str, str]:
    kinds = [stories.request, _number_exchange, facts.question, _greeting]
    return rng.choices(kinds, weights=[30, 30, 30, 10 if greet else 0])[0](rng)


def _greeting(rng: random.Random) -> tuple[str, str]:
    return rng.choice(facts.GREETINGS)


def _number_exchange(rng: random.Random) -> tuple[str, str]:
    direction = rng.choice(numbers.DIRECTIONS)
    asked, answer = numbers.draw(direction, rng)
    forms = [f"What is {asked} in {direction}?", f"Write {asked} in {direction}."]
    return rng.choice([*forms, f"{asked} in {direction}, please."]), answer
