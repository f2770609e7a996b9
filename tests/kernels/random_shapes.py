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
    """Options of `make_case`: its features, types and shapes."""
    head_dims = st.integers(1, max_head_dim)
    heads = st.tuples(st.integers(1, 3), st.integers(1, max_group)).map(lambda n: (n[0] * n[1], n[0]))
    return st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(dtypes),
            "heads": heads,
            "head_dims": st.tuples(head_dims, head_dims),
            "block_size": st.integers(1, 20),
            "sliding_window": st.none() | st.integers(1, 45),
            "softcap": st.none() | st.floats(0.5, 30),
            "with_sinks": st.booleans(),
            "scale": st.floats(0.05, 1.0),
            "seed": st.integers(0, 99),
        }
    )
