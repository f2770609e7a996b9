"""For every kernel test: one CPU thread, the same random numbers, and NaN in memory until it is written."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_fresh_memory(one_thread: None) -> Iterator[None]:
    """A row that a kernel forgets to write, or a partial result it should not read, is NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with it, PyTorch fills what `torch.empty` returns
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(deterministic)
