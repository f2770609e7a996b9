"""One model on several ranks: rank 0 schedules and samples, every rank computes its part of each layer or of
the layers (paper, section 4.6 and Figure 4).

    rank 0   engine -> plan -> message ----broadcast---->  ranks 1 ..: the same moves, the same rows
             each rank holds its heads of every block; a block id means the same on all of them
"""


class RankError(RuntimeError):
    """A rank died, or the ranks differ; one line that names the rank and the cause. Nothing can be
    computed any more: create a new `LLM`."""
