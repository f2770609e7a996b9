"""Lesson 14, done wrong: the worked ranks with one mistake each.

`caught_by` names the test that must notice, `task` the task whose tests must.
"""

import tempfile
from pathlib import Path

from minipaged.learn.overrides import load_override

WORKED = Path(__file__).parents[1] / "worked/14_two_ranks.py"
FOLDER = tempfile.TemporaryDirectory()


def mistake(name, caught_by, *changes, first_red="", says=""):
    """The worked file with each (right, wrong) replaced; `caught_by`: the name of a test, or a task."""
    source = WORKED.read_text()
    for right, wrong in changes:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    file = Path(FOLDER.name, f"ranks_{name}.py")
    file.write_text(source)
    variant = load_override(f"{file}:paged_attention")
    setattr(variant, "task" if isinstance(caught_by, int) else "caught_by", caught_by)
    variant.first_red, variant.says = first_red, says
    return variant


# -- from the exercise's text alone --------------------------------------------------------------------------

SLICE = "slice(self.number * share, (self.number + 1) * share)"
KEYS, VALUES = "keys[token, self.own(keys.shape[1])]", "values[token, self.own(values.shape[1])]"
COPY = "self.value_pool[destination] = self.value_pool[source]"
WRITES = "        block_size = self.key_pool.shape[2]\n"
COPIES = "        for source, destination in copies:\n"

deals_heads_like_cards = mistake("cards", 1, (SLICE, "slice(self.number, num_heads, self.size)"))
never_refuses = mistake("refuses", 1, ("if num_heads % self.size:", "if False:"))
refuses_only_too_few = mistake("few", 1, ("if num_heads % self.size:", "if num_heads < self.size:"))
counts_from_the_last_rank = mistake(
    "last", 1, (SLICE, "slice((self.size - 1 - self.number) * share, (self.size - self.number) * share)")
)
tells_one_number = mistake(
    "one", 1, ("{num_heads} heads do not divide among", "the heads do not divide among")
)
copies_keys_alone = mistake("keys", 2, (COPY, "pass"))
copies_on_rank_0_alone = mistake(
    "zero", 2, (COPIES, "        for source, destination in copies[: None if self.number == 0 else 0]:\n")
)
copies_all_at_once = mistake(
    "once",
    2,
    (
        COPIES,
        "        before = self.key_pool.clone(), self.value_pool.clone()\n" + COPIES,
    ),
    ("= self.key_pool[source]", "= before[0][source]"),
    ("= self.value_pool[source]", "= before[1][source]"),
)
copies_the_other_way = mistake("way", 2, ("for source, destination in", "for destination, source in"))
knows_one_block_size = mistake("four", 2, (WRITES, "        block_size = 4\n"))
writes_the_first_heads = mistake("first", 2, (KEYS, "keys[token, : self.key_pool.shape[1]]"))
writes_the_values_of_the_first_heads = mistake(
    "valued", 2, (VALUES, "values[token, : self.key_pool.shape[1]]")
)
takes_slots_for_blocks = mistake("slots", 2, ("slot // block_size, slot %", "slot % block_size, slot //"))
counts_slots_of_its_own = mistake(
    "share", 2, (WRITES, "        block_size = self.key_pool.shape[2] // self.size\n")
)
forgets_the_last_token = mistake("token", 2, ("in enumerate(slots):", "in enumerate(slots[:-1] or slots):"))
attends_with_the_first_queries = mistake(
    "queries", 2, ("query[:, own], self", "query[:, : query.shape[1] // self.size], self")
)
picks_queries_by_kv_heads = mistake(
    "kv", 2, ("own = self.own(query.shape[1])\n", "own = self.own(self.key_pool.shape[1] * self.size)\n")
)
gives_everybody_the_first_sinks = mistake("sinks", 2, ("sinks[own]", "sinks[: own.stop - own.start]"))
drops_the_sinks = mistake("no_sinks", 2, ("sinks=mine", "sinks=None"))
adds_the_bias_on_every_rank = mistake("bias", 3, ("bias is None or self.number", "bias is None"))
never_adds_the_bias = mistake("no_bias", 3, ("bias is None or self.number", "True"))
adds_the_bias_on_the_second_rank = mistake(
    "second", 3, ("bias is None or self.number", "bias is None or self.number != 1")
)
multiplies_with_the_first_columns = mistake(
    "columns",
    3,
    ("weight[:, own.start * head_dim : own.stop * head_dim]", "weight[:, : attended[0].numel()]"),
)
takes_rows_for_columns = mistake(
    "rows",
    3,
    (
        "weight[:, own.start * head_dim : own.stop * head_dim]",
        "weight.T[:, own.start * head_dim : own.stop * head_dim]",
    ),
)
counts_columns_as_heads = mistake(
    "head",
    3,
    (
        "weight[:, own.start * head_dim : own.stop * head_dim]",
        "weight.unflatten(1, (head_dim, -1))[:, :, own].flatten(1)",
    ),
)
averages = mistake(
    "mean",
    3,
    ("part = attended.flatten(1) @ columns.T", "part = attended.flatten(1) @ columns.T / self.size"),
)
uses_up_the_copies = mistake(
    "used_up",
    2,
    ("for source, destination in copies:", "while copies:\n            source, destination = copies.pop(0)"),
)
adds_half_of_the_bias_on_every_rank = mistake(
    "half_bias",
    "test_the_bias_is_in_the_sum_once",
    ("part if bias is None or self.number else part + bias", "part if bias is None else part + bias / 2"),
)
refuses_on_rank_0_alone = mistake(
    "refuses_first", 1, ("if num_heads % self.size:", "if num_heads % self.size and self.number == 0:")
)
copies_from_a_dict_of_sources = mistake(
    "dict", 2, ("destination in copies:", "destination in dict(copies).items():")
)
copies_from_a_dict_of_destinations = mistake(
    "destinations",
    2,
    ("for source, destination in copies:", "for destination, source in {d: s for s, d in copies}.items():"),
)
writes_in_order_of_slots = mistake("sorted", 2, ("in enumerate(slots):", "in enumerate(sorted(slots)):"))
writes_a_block_at_most = mistake("a_block", 2, ("in enumerate(slots):", "in enumerate(slots[:block_size]):"))
takes_blocks_for_places = mistake("blocks", 2, (WRITES, "        block_size = self.key_pool.shape[0]\n"))
takes_sinks_of_0_for_none = mistake(
    "no_sink", 2, ("None if sinks is None else", "None if sinks is None or not sinks.any() else")
)
adds_the_mean_of_the_bias = mistake("mean_bias", 3, ("else part + bias", "else part + bias.mean()"))
NEW_TOKENS = "test_new_tokens_go_to_the_same_slots_on_every_rank"
writes_a_place_too_early = mistake(
    "early",
    2,
    ("slot // block_size, slot %", "slot // block_size, slot % block_size - 1 #"),
    first_red=NEW_TOKENS,
)
leaves_block_0_out = mistake(
    "block_0", 2, (WRITES, WRITES + "        slots = [slot or 1 for slot in slots]\n"), first_red=NEW_TOKENS
)
writes_into_copies = mistake(
    "flat",
    2,
    ("self.key_pool[block, :, place]", "self.key_pool.transpose(1, 2).flatten(0, 1)[slot]"),
    first_red=NEW_TOKENS,
)
uses_up_the_keys = mistake(
    "zero_keys",
    2,
    (VALUES + "\n", VALUES + "\n        keys.zero_()\n"),
    says="follow changed keys, which it may only read",
)
uses_up_the_values = mistake(
    "zero_values",
    2,
    (VALUES + "\n", VALUES + "\n        values.zero_()\n"),
    says="follow changed values, which it may only read",
)
ATTEND = "        mine = None if sinks is None else sinks[own]\n"
clears_the_queries_of_others = mistake(
    "zero_query",
    2,
    (ATTEND, ATTEND + "        query[:, : own.start] = 0\n"),
    says="attend changed query, which it may only read",
)
clears_the_sinks_of_others = mistake(
    "zero_sinks",
    2,
    (ATTEND, "        if sinks is not None:\n            sinks[: own.start] = 0\n" + ATTEND),
    first_red="test_a_sink_belongs_to_its_query_head",
    says="attend changed sinks, which it may only read",
)
uses_up_the_bias = mistake(
    "zero_bias",
    3,
    (
        "        return part if bias is None or self.number else part + bias",
        "        if bias is None or self.number:\n            return part\n"
        "        part = part + bias\n        bias.zero_()\n        return part",
    ),
    says="project changed bias, which it may only read",
)
deals_for_two_ranks = mistake(
    "two", 1, ("share = num_heads // self.size", "share = num_heads // 2"), says="8 heads, size 1"
)
