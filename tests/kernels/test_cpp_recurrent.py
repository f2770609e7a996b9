"""What recurrent layers compute against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from minipaged.kernels.cpp.build import DTYPES
from minipaged.kernels.dispatch import why_not_cpp

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged.kernels.cpp.recurrent import convolve, convolve_, delta_rule_, mamba2_
from tests.kernels.layer_formulas import assert_near, exact_delta_rule, exact_mamba2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 15, 16, 77])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution(dtype, channels, size, with_bias):
    """Catches states that are not shifted, reversed weights, channels at the end that fill no vector."""
    history = torch.randn(3, channels, size + 5).to(dtype)
    weight, bias = (
        torch.randn(channels, size).to(dtype),
        torch.randn(channels).to(dtype) if with_bias else None,
    )
    states = history[:, :, :size].contiguous()
    exact = functional.conv1d(
        *(history.double(), weight.double()[:, None], None if bias is None else bias.double()),
        groups=channels,
    )
    rows = history.transpose(1, 2).contiguous().transpose(0, 1)  # [token, sequence, channel]
    for token in range(5):
        assert_near(convolve_(states, rows[size + token], weight, bias), exact[:, :, 1 + token])
        assert states.equal(history[:, :, 1 + token : 1 + token + size])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 15, 16, 77, 300])
@pytest.mark.parametrize(("size", "num_tokens"), [(1, 3), (3, 2), (4, 9)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution_of_many_tokens(dtype, channels, size, num_tokens, with_bias):
    """Catches another sequence's tokens in place of zeros, another channel's weights."""
    rows, weight = torch.randn(2, num_tokens, channels).to(dtype), torch.randn(channels, size).to(dtype)
    bias = torch.randn(channels).to(dtype) if with_bias else None
    padded = functional.pad(rows.mT.double(), (size - 1, 0))
    exact_bias = None if bias is None else bias.double()
    exact = functional.conv1d(padded, weight.double()[:, None], exact_bias, groups=channels)
    assert_near(convolve(rows, weight, bias), exact.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [5, 16, 77])
@pytest.mark.parametrize("size", [3, 4])
def test_a_convolution_has_the_same_bits_for_one_token_as_for_many(dtype, channels, size):
    """Catches another order of the sum, and products that are rounded in one of the two."""
    rows, weight = torch.randn(2, 9, channels).to(dtype), torch.randn(channels, size).to(dtype)
    bias, states = torch.randn(channels).to(dtype), torch.zeros(2, channels, size, dtype=dtype)
    together = convolve(rows, weight, bias)
    for token in range(9):
        assert convolve_(states, rows[:, token].contiguous(), weight, bias).equal(together[:, token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (20, 12), (5, 33), (24, 150)])
def test_delta_rule(dtype, heads, key_heads, key_dim, value_dim):
    """Catches decay after the update, another head's keys, heads taken for their neighbours, lost queries."""
    states = torch.randn(3, heads, key_dim, value_dim)
    exact_states = states.double()
    for _ in range(3):
        query, key = (torch.randn(3, key_heads, key_dim).to(dtype) for _ in range(2))
        value = torch.randn(3, heads, value_dim).to(dtype)
        decay, beta = -torch.rand(3, heads), torch.rand(3, heads)
        exact, exact_states = exact_delta_rule(exact_states, query, key, value, decay, beta)
        parts = (part[:, None] for part in (query, key, value, decay, beta))
        assert_near(delta_rule_(states, *parts)[:, 0], exact)
        torch.testing.assert_close(states.double(), exact_states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[130], [1, 64, 65], [63, 2, 1, 64]])
def test_delta_rule_of_many_tokens(dtype, lengths):
    """A token has the same result, bit for bit, wherever its sequence is cut; and next to other data."""
    heads, key_heads, key_dim, value_dim = 4, 2, 20, 150
    sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    parts = torch.randn(2, sum(lengths), sum(sizes)).to(dtype).split(sizes, -1)
    tokens = [part.unflatten(-1, (count, -1)) for part, count in zip(parts, (key_heads, key_heads, heads))]
    tokens += [-torch.rand(2, sum(lengths), heads), torch.rand(2, sum(lengths), heads)]
    states = torch.randn(2, heads, key_dim, value_dim)
    exact_states, one_by_one = states.double(), states.clone()
    outputs = [delta_rule_(states, *pieces) for pieces in zip(*(part.split(lengths, 1) for part in tokens))]
    for token, output in enumerate(torch.cat(outputs, 1).unbind(1)):
        exact, exact_states = exact_delta_rule(exact_states, *(part[:, token] for part in tokens))
        assert_near(output, exact)
        single = delta_rule_(one_by_one, *(part[:, token, None] for part in tokens))
        assert single[:, 0].equal(output)
    torch.testing.assert_close(states.double(), exact_states, atol=1e-5, rtol=1e-5)
    assert states.equal(one_by_one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize(("width", "size"), [(32, 16), (16, 40), (5, 33), (17, 3)])
def test_mamba2(dtype, heads, groups, width, size):
    """Catches another head's decay or group, the old state's output, ends that fill no vector."""
    states = torch.randn(3, heads, width, size)
    A, D = -torch.rand(heads), torch.randn(heads)
    exact_states = states.double()
    for _ in range(3):
        x = torch.randn(3, heads, width).to(dtype)
        B, C = (torch.randn(3, groups, size).to(dtype) / size**0.5 for _ in range(2))
        dt = torch.rand(3, heads)
        exact, exact_states = exact_mamba2(exact_states, x, dt, A, B, C, D)
        assert_near(mamba2_(states, x, dt, A, B, C, D), exact)
        torch.testing.assert_close(states.double(), exact_states, atol=1e-5, rtol=1e-5)
