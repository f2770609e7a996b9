"""Random combinations of features and shapes, which no table of cases covers."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

LENGTHS = st.lists(
    st.integers(1, 45).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context))),
    min_size=1,
    max_size=4,
)
"""(query length, context length) of each sequence."""


def options_of_a_case(
    dtypes: Sequence[torch.dtype], max_group: int = 5, max_head_dim: int = 40
) -> st.SearchStrategy[dict[str, object]]:
    """Options of `check_attention`: features, types and shapes.

    A head has 8 values at least. Fewer may all be means of numbers that cancel, by chance, and then their
    rounding errors look large; tables of cases have such heads.
    """
    heads = st.tuples(st.integers(1, 3), st.integers(1, max_group)).map(lambda n: (n[0] * n[1], n[0]))
    return st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(dtypes),
            "heads": heads,
            "head_dims": st.tuples(st.integers(1, max_head_dim), st.integers(8, max_head_dim)),
            "block_size": st.integers(1, 20),
            "sliding_window": st.none() | st.integers(1, 45),
            "softcap": st.none() | st.floats(0.5, 30),
            "with_sinks": st.booleans(),
            "scale": st.floats(0.05, 1.0),
            "seed": st.integers(0, 99),
        }
    )
