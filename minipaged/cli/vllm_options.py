"""Options of vLLM's commands that are not here: the error says what to give instead."""

from __future__ import annotations

from collections.abc import Iterable

from minipaged.vllm_names import DROP, MERGE
from minipaged.vllm_settings import HARMLESS, IGNORED, RENAMED

CALLS = "drop it: calls in the formats of Hermes and Qwen are read, and others that the tokenizer declares"
REASONING = "drop it: reasoning between <think> and </think> is read, and what else the tokenizer declares"
REPLICAS = "give --replicas to minipaged serve"
PROXY = "put a proxy that speaks TLS in front"
SPECULATION = "give --num-speculative-tokens, and --speculative-model unless drafts come from prompt lookup"

SERVER = """allow_credentials allowed_headers allowed_methods chat_template_content_format
disable_access_log_for_endpoints disable_fastapi_docs disable_frontend_multiprocessing
disable_uvicorn_access_log enable_log_deltas enable_log_outputs enable_prompt_tokens_details
enable_request_id_headers enable_server_load_tracking grpc h11_max_header_count h11_max_incomplete_event_size
headless log_error_stack max_log_len middleware response_role root_path tool_server
trust_request_chat_template uvicorn_log_level"""
"""Settings of vLLM's server alone: logs, its own machinery, or what is always on here."""

INSTEAD = {
    "--allowed-origins": "give --allow-origin",
    "--api-server-count": REPLICAS,
    "--chat-template": "put it into the model's folder as chat_template.jinja",
    "--data-parallel-size": REPLICAS,
    "--download-dir": "set HF_HOME in the environment",
    "--enable-auto-tool-choice": CALLS,
    "--enable-force-include-usage": "give stream_options in each request",
    "--enforce-eager": "give --no-enable-cuda-graphs",
    "--hf-token": "set HF_TOKEN in the environment",
    "--lora-modules": MERGE,
    "--reasoning-parser": REASONING,
    "--reasoning-parser-plugin": REASONING,
    "--return-tokens-as-token-ids": "give return_token_ids in each request",
    "--speculative-config": SPECULATION,
    **dict.fromkeys(("--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-certfile", "--ssl-keyfile"), PROXY),
    "--tool-call-parser": CALLS,
    "--tool-parser-plugin": CALLS,
    "--tp": "give --tensor-parallel-size",
    "--uds": "give --host and --port",
    "-asc": REPLICAS,
    "-dp": REPLICAS,
    "-pp": "give --pipeline-parallel-size",
    "-q": "give --quantization",
    "-sc": SPECULATION,
    "-tp": "give --tensor-parallel-size",
}


ARGUMENTS = {
    "bench latency": "give --prompt-tokens and --output-tokens",
    "bench serve": "give --url to measure a server",
    "bench throughput": "give --prompt-tokens and --output-tokens",
}
"""Beginning of a command line -> what to give instead of its second word."""


def message_about(option: str, typed: Iterable[str]) -> str | None:
    """The message about an unknown option; None if vLLM has none of this name.

    Args:
        option: as the parser names it, which is only `-t` for `-tp`.
        typed: the command line.
    """
    if option and not option.startswith("--"):
        option = next((word for word in typed if word.startswith(option)), option)
    option = option.partition("=")[0]
    name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    fix = INSTEAD.get(option)
    if name in RENAMED:
        fix = f"give --{RENAMED[name].replace('_', '-')}"
    elif name in (*IGNORED, *HARMLESS, *SERVER.split()):
        fix = fix or DROP
    return f"No such option: {option}; {fix}" if fix else None
