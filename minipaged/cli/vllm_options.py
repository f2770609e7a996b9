"""Options of vLLM's commands that are not here: the error says what to give instead."""

from __future__ import annotations

from collections.abc import Iterable

from minipaged.vllm_settings import HARMLESS, IGNORED, IGNORED_PREFIXES, RENAMED

DROP = "drop it"
CALLS = "drop it: calls in the format of Hermes and Qwen are always recognised, others are not"
REPLICAS = "give --replicas to minipaged serve"
SPECULATION = "give --num-speculative-tokens, and --speculative-model unless drafts come from prompt lookup"

INSTEAD = {
    "--allowed-origins": "give --allow-origin",
    "--chat-template": "put it into the model's folder as chat_template.jinja",
    "--data-parallel-size": REPLICAS,
    "--disable-log-requests": DROP,
    "--download-dir": "set HF_HOME in the environment",
    "--enable-auto-tool-choice": CALLS,
    "--enforce-eager": "give --no-enable-cuda-graphs",
    "--hf-token": "set HF_TOKEN in the environment",
    "--speculative-config": SPECULATION,
    "--tool-call-parser": CALLS,
    "--tp": "give --tensor-parallel-size",
    "-dp": REPLICAS,
    "-pp": "give --pipeline-parallel-size",
    "-q": "give --quantization",
    "-sc": SPECULATION,
    "-tp": "give --tensor-parallel-size",
}


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
    elif name in IGNORED or name in HARMLESS or name.startswith(IGNORED_PREFIXES):
        fix = fix or DROP
    return f"No such option: {option}; {fix}" if fix else None
