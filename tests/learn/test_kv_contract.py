"""The contract of a KV manager: memory kept, lost or written over is reported at once, with the method."""

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.learn.contracts import ContractError
from minipaged.memory import KVManager

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(n=3, seed=4, max_tokens=20, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=15),
    GREEDY.clone(max_tokens=12),
]
PROMPTS = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(4)]


class DropsCopies(KVManager):
    def grow(self, sequences, needed):
        super().grow(sequences, needed)
        return []


class NeverCopies(KVManager):
    def grow(self, sequences, needed):
        for sequence in sequences:
            table = sequence.table
            missing = self.num_blocks_of(len(sequence.token_ids)) - len(table.blocks)
            table.preallocate(missing)
            table.use_slots(len(sequence.token_ids))
        return []


class GrowsOne(KVManager):
    def grow(self, sequences, needed):
        return super().grow(sequences[:1], needed)


class SaysNothing(KVManager):
    def grow(self, sequences, needed):
        super().grow(sequences, needed)


class AsksForLess(KVManager):
    def blocks_to_grow(self, sequences):
        return max(0, super().blocks_to_grow(sequences) - 1)


class AdmitsAll(KVManager):
    def can_admit(self, sequences, others_run=True):
        return super().can_admit(sequences, others_run)._replace(fits=True)


class AdmitsWithoutSlots(KVManager):
    def admit(self, sequences, admission):
        return []


class Forgets(KVManager):
    def free(self, sequences):
        sequences = list(sequences)
        super().free(sequences[:-1] if len(sequences) > 1 else sequences)


class CountsOn(KVManager):
    def free(self, sequences):
        for sequence in sequences:
            sequence.table.free()


class FailsToFree(KVManager):
    def free(self, sequences):
        raise IndexError("no such block")


class RegistersEarly(KVManager):
    def register(self, sequence, num_tokens):
        super().register(sequence, num_tokens + 4)


class CountsMoreAsRegistered(KVManager):
    def register(self, sequence, num_tokens):
        sequence.num_registered_blocks = num_tokens // self.block_size + 1


@pytest.mark.parametrize(
    ("manager", "message"),
    [
        (
            DropsCopies,
            r"grow returned the copies \[\] where \[\(\d+, \d+\), .*\)\] are needed; return one for",
        ),
        (SaysNothing, r"grow returned the copies None where \[\] are needed"),
        (NeverCopies, r"grow lets Sequence\(.* write to block \d+, which another table holds; replace it by"),
        (GrowsOne, r"grow left Sequence\(.* with slots for \d+ of its \d+ tokens; give every token one"),
        (AsksForLess, r"blocks_to_grow of \d+ sequences returned \d; their tokens need \d more blocks"),
        (AdmitsAll, r"admit\(.*\) raised OutOfBlocksError: .* \(prefix_cache.py, line \d+\)"),
        (
            AdmitsWithoutSlots,
            r"admit left Sequence\(.* with slots for 0 of its 3 tokens; give every token one",
        ),
        (
            Forgets,
            r"free left Sequence\(.* with \d+ blocks and \d+ tokens computed; give back all, count none",
        ),
        (
            CountsOn,
            r"free left Sequence\(.* with 0 blocks and \d+ tokens computed; give back all, count none",
        ),
        (FailsToFree, r"free\(.*\) raised IndexError: no such block \(test_kv_contract.py, line \d+\)"),
        (
            RegistersEarly,
            r"register\(Sequence.*, \d+\) raised IndexError: .* \(test_kv_contract.py, line \d+\)",
        ),
        (CountsMoreAsRegistered, r"register\(Sequence.*, 3\) left 1 blocks registered, of which 0 are full"),
    ],
)
def test_a_manager_that_loses_or_mixes_up_memory_is_reported(manager, message):
    """Catches wrong tokens and blocks that are held forever, without an error."""
    llm = LLM(use={"kv_manager": manager}, block_size=4, num_blocks=20, disable_log_stats=True)
    with pytest.raises(ContractError, match=f"^kv_manager: {message}"):
        llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("manager", [DropsCopies, GrowsOne, AsksForLess, AdmitsAll, RegistersEarly])
def test_after_a_breach_the_blocks_come_back(manager):
    """Catches a contract that, once broken, does not let go of anything."""
    llm = LLM(use={"kv_manager": manager}, block_size=4, num_blocks=20, disable_log_stats=True)
    with pytest.raises(ContractError):
        llm.generate(PROMPTS, PARAMS)
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.kv.num_used == 0


def test_a_copy_of_a_cached_block_that_is_dropped_is_reported():
    """Catches a prompt cached to its last token, whose last block has nobody's keys."""

    class Drops(KVManager):
        def admit(self, sequences, admission):
            super().admit(sequences, admission)
            return []

    llm = LLM(use={"kv_manager": Drops}, block_size=4, num_blocks=20, disable_log_stats=True)
    prompt = {"prompt_token_ids": list(range(5, 13))}
    llm.generate(prompt, GREEDY)
    message = (
        r"^kv_manager: admit returned the copies \[\] where \[\(\d+, \d+\)\] are needed; return one for each"
    )
    with pytest.raises(ContractError, match=message):
        llm.generate(prompt, GREEDY)


def test_a_manager_that_keeps_the_rules_changes_nothing():
    """Catches a contract that accuses the project's own class, or that changes what is computed."""
    mine = type("Mine", (KVManager,), {})
    outputs = [
        LLM(use=use, block_size=4, num_blocks=20, disable_log_stats=True).generate(PROMPTS, PARAMS)
        for use in (None, {"kv_manager": mine})
    ]
    plain, watched = ([[c.token_ids for c in output.outputs] for output in each] for each in outputs)
    assert watched == plain
