"""An OpenAI-compatible HTTP server over `AsyncLLM`: FastAPI, uvicorn, server-sent events.

    request_log (id) -> gate (key, limits) -> schemas -> body_params -> generation
        -> completions | chat | responses

The event loop never waits for a step: requests go to the engine's thread, and outputs come back from it.
"""
