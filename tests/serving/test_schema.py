"""Bodies that schemathesis draws from the server's own OpenAPI document: none of them is a 500."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from minipaged import AsyncLLM
from tests.serving.conftest import running

OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{name}"),
]


@pytest.fixture(scope="module")
def small():
    with running(AsyncLLM(num_blocks=64, max_model_len=64, disable_log_stats=True)) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda value: value)
def test_no_body_that_the_schema_allows_or_forbids_is_a_500(small, method, path):
    """Catches a combination of fields that nobody thought of."""
    schema = schemathesis.openapi.from_dict(small.server.config.app.openapi())
    cases = schema[path][method].as_strategy()

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def check(case) -> None:
        answer = case.call(base_url=small.url, timeout=60)
        assert answer.status_code < 500, answer.text
        assert answer.status_code in (200, 400, 404, 405, 413), answer.text

    check()
    small.assert_released()
    assert small.http.get("/health").status_code == 200
