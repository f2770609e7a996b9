"""One LLM, several users at a time: whoever steps the engine, every output reaches the one who asked."""

from __future__ import annotations

import threading

import pytest

from minipaged import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The little robot", "Once upon a time", "One day Tom", "The fox"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = LLM(num_blocks=256, max_model_len=512, disable_log_stats=True)
    llm.engine.on_committed.append(lambda *step: llm.engine.check_invariants())
    return llm


@pytest.fixture(scope="module")
def texts(llm) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS)]


def test_a_stream_keeps_its_text_while_somebody_else_generates(llm, texts):
    """Catches tokens that `generate` computed for an open stream, and that nobody told."""
    stream = llm.stream(PROMPTS[0], PARAMS)
    pieces = [next(stream)]
    llm.generate(PROMPTS[1], PARAMS)
    assert "".join(pieces + list(stream)) == texts[0]


def test_two_streams_read_in_turn_are_both_complete(llm, texts):
    """Catches a last token that came in the other stream's step."""
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS[:2]]
    pieces: list[list[str]] = [[], []]
    while streams[0] or streams[1]:
        for i, stream in enumerate(streams):
            piece = next(stream, None) if stream else None
            if piece is None:
                streams[i] = None
            else:
                pieces[i].append(piece)
    assert ["".join(parts) for parts in pieces] == texts[:2]


def test_threads_may_call_generate_at_the_same_time(llm, texts):
    """Catches a plan that two threads commit."""
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        outputs = [llm.generate(PROMPTS[(number + i) % 4], PARAMS)[0].outputs[0].text for i in range(4)]
        results[number] = outputs[-number:] + outputs[:-number] if number else outputs

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == dict.fromkeys(range(4), texts)
    assert llm.engine.scheduler.kv.num_used == 0
