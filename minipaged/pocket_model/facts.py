"""Short true sentences: animals, everyday things, emoji, and the machinery of paged attention itself.

The last group is what a reader of this project will ask about, so the pocket model knows how to say it.  The
emoji are there so that generated text holds characters of several tokens.
"""

import random
from typing import NamedTuple

from minipaged.pocket_model.grammar import expand, tidy


class Animal(NamedTuple):
    """What a document may say of an animal; every field continues a sentence."""

    name: str
    home: str
    food: str
    skill: str
    emoji: str


ANIMALS = (
    Animal("fox", "in the forest", "mice and berries", "hear a mouse under the snow", "🦊"),
    Animal("rabbit", "in a burrow under the ground", "grass and leaves", "hop very fast", "🐰"),
    Animal("bear", "in the forest", "berries, fish and honey", "sleep through the winter", "🐻"),
    Animal("owl", "in the trees", "mice", "see in the dark", "🦉"),
    Animal("frog", "in ponds and rivers", "flies and worms", "jump far", "🐸"),
    Animal("turtle", "near ponds and rivers", "leaves and worms", "hide in its shell", "🐢"),
    Animal("mouse", "in fields and houses", "seeds and grain", "squeeze through a small hole", "🐭"),
    Animal("duck", "on ponds and lakes", "plants and worms", "swim and fly", "🦆"),
    Animal("cat", "with people in houses", "fish and meat", "land on its feet", "🐱"),
    Animal("dog", "with people in houses", "meat and bones", "smell what we can not smell", "🐶"),
    Animal("horse", "in fields and stables", "grass and hay", "run for a long time", "🐴"),
    Animal("cow", "in fields and barns", "grass and hay", "give milk", "🐮"),
    Animal("bee", "in a hive", "nectar from flowers", "make honey", "🐝"),
    Animal("whale", "in the sea", "small fish", "sing under water", "🐳"),
    Animal("penguin", "on cold coasts", "fish", "swim but not fly", "🐧"),
    Animal("hedgehog", "in gardens", "worms and beetles", "roll into a ball", "🦔"),
    Animal("squirrel", "in the trees", "nuts and seeds", "climb any tree", "🐿"),
    Animal("spider", "in a web", "flies", "make a thread", "🕷"),
    Animal("camel", "in the desert", "dry plants", "go many days without water", "🐫"),
    Animal("goat", "on the hills", "grass and leaves", "climb steep rocks", "🐐"),
)

EMOJI = (
    ("the sun", "☀"), ("the moon", "🌙"), ("a star", "⭐"), ("a tree", "🌳"), ("a flower", "🌸"), ("a book", "📖"),
    ("a robot", "🤖"), ("a rocket", "🚀"), ("a heart", "❤"), ("an apple", "🍎"), ("a cake", "🍰"), ("a house", "🏠"),
    ("a boat", "⛵"), ("a fish", "🐟"), ("a bell", "🔔"), ("a key", "🔑"), ("a clock", "⏰"), ("rain", "🌧"),
)  # fmt: skip

# Question, answer. Every answer is a full sentence, so that it reads well in a document without the question.
THE_WORLD = (
    ("What colour is the sky on a clear day?", "The sky is blue on a clear day."),
    ("What colour is snow?", "Snow is white."),
    ("What colour is grass?", "Grass is green."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many wheels does a car have?", "A car has four wheels."),
    ("What is the capital of France?", "Paris is the capital of France."),
    ("What is the capital of Italy?", "Rome is the capital of Italy."),
    ("What is the capital of Spain?", "Madrid is the capital of Spain."),
    ("What is the capital of Japan?", "Tokyo is the capital of Japan."),
    ("What is the capital of Egypt?", "Cairo is the capital of Egypt."),
    ("What is the capital of Norway?", "Oslo is the capital of Norway."),
    ("What is ice?", "Ice is frozen water."),
    ("What is bread made of?", "Bread is made of flour, water and salt."),
    ("What is glass made of?", "Glass is made of sand."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What comes after winter?", "Spring comes after winter."),
    ("What comes after summer?", "Autumn comes after summer."),
    ("What do plants need?", "Plants need water, air and light."),
    ("What is a map for?", "A map shows where places are."),
    ("What does a clock show?", "A clock shows the time."),
    ("What is the moon?", "The moon is a ball of rock that goes around the earth."),
    ("Why do leaves fall?", "Leaves fall because trees rest in the winter."),
)  # fmt: skip

PAGED_ATTENTION = (
    ("What is PagedAttention?", "PagedAttention is a way to store keys and values in small blocks that need not lie side by side."),
    ("What is a block?", "A block is a small piece of memory that holds the keys and values of a few tokens."),
    ("What is a block table?", "A block table maps the logical blocks of a sequence to physical blocks."),
    ("What is the KV cache?", "The KV cache keeps the keys and values of all tokens so that they are not computed again."),
    ("What is a token?", "A token is a small piece of text, such as a word or a part of a word."),
    ("What is a language model?", "A language model is a program that guesses the next token."),
    ("What is the prefill?", "The prefill is the step that computes the keys and values of the whole prompt."),
    ("What is decoding?", "Decoding makes one new token at a time."),
    ("What is copy on write?", "Copy on write means that a shared block is copied only when a sequence writes to it."),
    ("What is fragmentation?", "Fragmentation is memory that is free or reserved but can not be used."),
    ("What is preemption?", "Preemption means that a request gives its blocks back so that another request can go on."),
    ("What is swapping?", "Swapping moves blocks from the GPU to the memory of the host and back."),
    ("What is recomputation?", "Recomputation means that lost keys and values are simply computed again."),
    ("What is a prefix cache?", "A prefix cache lets requests that start with the same text share the same blocks."),
    ("What does the scheduler do?", "The scheduler decides which requests run in the next step."),
    ("What does the block allocator do?", "The block allocator hands out free blocks and counts who uses them."),
    ("What is a batch?", "A batch is a group of requests that run together."),
    ("Why do blocks save memory?", "Blocks save memory because only the last block of a sequence can be partly empty."),
    ("What is beam search?", "Beam search keeps the best few sequences at each step."),
    ("What is greedy decoding?", "Greedy decoding always takes the most likely token."),
    ("What is the temperature?", "The temperature says how bold the choice of the next token is."),
)  # fmt: skip

GREETINGS = (
    ("Hello!", "Hello! I can tell you a story, read a number, or answer a small question."),
    ("Hi", "Hi! Would you like to hear a story?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! What would you like to hear today?"),
    ("How are you?", "I am well, thank you. Shall I tell you a story?"),
    ("Who are you?", "I am a very small language model. I tell stories and I know my numbers."),
    (
        "What can you do?",
        "I can tell short stories, write numbers in words or digits, and explain a few things.",
    ),
    ("Thank you!", "You are welcome!"),
)
SYSTEM_PROMPTS = (
    "You are a kind storyteller.",
    "You are a helpful assistant.",
    "You are fond of stories and numbers.",
    "Be friendly and clear.",
)  # fmt: skip

_ANIMAL_SENTENCES = (
    "{a_name} [is an animal that lives|lives] {home}.",
    "[it|the {name}] eats {food}.",
    "[it|the {name}] can {skill}.",
)
_ANIMAL_QUESTIONS = (
    ("Where does {a_name} live?", "{a_name} lives {home}."),
    ("What does {a_name} eat?", "{a_name} eats {food}."),
    ("What can {a_name} do?", "{a_name} can {skill}."),
    ("Tell me about the {name}.", "{a_name} lives {home}. it eats {food}. it can {skill}."),
    ("What is the emoji for {a_name}?", "The emoji for {a_name} is {emoji}."),
)


def document(rng: random.Random) -> str:
    """A few facts of one topic, as a paragraph."""
    topic = rng.choice(["animals", "the world", "paged attention", "paged attention", "emoji"])
    if topic == "animals":
        return " ".join(_about(animal, rng) for animal in rng.sample(ANIMALS, rng.randint(1, 4)))
    if topic == "emoji":
        pairs = [*EMOJI, *((f"a {animal.name}", animal.emoji) for animal in ANIMALS)]
        return tidy(
            " ".join(
                f"the emoji for {name} is {emoji}." for name, emoji in rng.sample(pairs, rng.randint(2, 6))
            )
        )
    source = THE_WORLD if topic == "the world" else PAGED_ATTENTION
    return " ".join(answer for _, answer in rng.sample(source, rng.randint(3, 8)))


def question(rng: random.Random) -> tuple[str, str]:
    """A question and its one-sentence answer."""
    source = rng.choice([THE_WORLD, PAGED_ATTENTION, PAGED_ATTENTION, _ANIMAL_QUESTIONS])
    asked, answer = rng.choice(source)
    if source is not _ANIMAL_QUESTIONS:
        return asked, answer
    slots = _slots(rng.choice(ANIMALS))
    return tidy(expand(asked, slots, rng)), tidy(expand(answer, slots, rng))


def _about(animal: Animal, rng: random.Random) -> str:
    return tidy(" ".join(expand(sentence, _slots(animal), rng) for sentence in _ANIMAL_SENTENCES))


def _slots(animal: Animal) -> dict[str, str]:
    return {**animal._asdict(), "a_name": f"a {animal.name}"}
