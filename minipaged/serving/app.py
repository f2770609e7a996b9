"""The application: which function answers which path."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

import minipaged
from minipaged.async_llm import AsyncLLM
from minipaged.engine_thread import EngineStoppedError
from minipaged.serving.chat import CHAT, plain_messages
from minipaged.serving.completions import COMPLETIONS
from minipaged.serving.error_handlers import install_handlers
from minipaged.serving.errors import ApiError, api_error, json_response
from minipaged.serving.gate import Gate, allow_origins
from minipaged.serving.generation import respond
from minipaged.serving.request_log import RequestLog
from minipaged.serving.response_schemas import ResponsesBody
from minipaged.serving.responses import RESPONSES
from minipaged.serving.schemas import ChatBody, CompletionBody, DetokenizeBody, TemplateOptions, TokenizeBody
from minipaged.serving.service import Service
from minipaged.serving.settings import ServerSettings
from minipaged.serving.streaming import EventStream
from minipaged.viewer.page import live_page

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of the page at "/": what it may load, and from where."""


def create_app(llm: AsyncLLM, model_name: str, settings: ServerSettings) -> FastAPI:
    """An ASGI application that serves a model; `app.state.service` is its `Service`.

    Args:
        llm: the engine; the caller shuts it down.
        model_name: what clients call the model.
        settings: of the server.
    """
    service = Service(llm, model_name, settings)
    app = FastAPI(
        title="minipaged",
        version=minipaged.__version__,
        docs_url=None,  # (they load scripts from elsewhere)
        redoc_url=None,
        responses={"4XX": {"description": "OpenAI's error object"}},
        redirect_slashes=False,  # (behind a router or a proxy, the address would be a private one)
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    install_handlers(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    _add_views(app, service)
    app.add_middleware(Gate, service=service)
    allow_origins(app, service.settings)
    app.add_middleware(RequestLog, answers=service.metrics.answers)  # (each wraps those before it)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await respond(service, request, body, COMPLETIONS)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await respond(service, request, body, CHAT)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesBody) -> Response:
        return await respond(service, request, body, RESPONSES)

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "minipaged",
        "max_model_len": service.max_model_len,
    }


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            what = "neither prompt nor messages is" if body.prompt is None else "both prompt and messages are"
            raise ApiError(400, f"{what} given; give exactly one", "prompt")

        async def tokens_and_texts() -> tuple[list[int], list[str] | None]:
            if body.prompt is not None:
                [tokens] = await service.encode([body.prompt], body.add_special_tokens)
            else:
                messages = plain_messages(body.messages or [])
                tokens = await service.encode_chat(messages, **body.template_options)
            spell = service.tokenizer.convert_ids_to_tokens
            return tokens, await service.in_thread(spell, tokens) if body.return_token_strs else None

        try:
            tokens, texts = await service.prepare(request, tokens_and_texts())
        except ValueError as error:
            field = "messages" if body.prompt is None else "prompt"
            raise api_error(error, TemplateOptions.model_fields, field) from error
        fields = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
        return json_response(fields if texts is None else {**fields, "token_strs": texts})

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        size = service.llm.engine.executor.vocab_size
        for token in body.tokens:
            if not 0 <= token < size:
                raise ApiError(400, f"tokens has {token}; give ids from 0 to {size - 1}", "tokens")
        try:
            decoding = service.in_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
            text = await service.prepare(request, decoding)
        except ValueError as error:
            raise api_error(error, (), "tokens") from error
        return json_response({"prompt": text})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        if service.ailment is not None:
            raise ApiError(503, service.ailment, code="unhealthy")
        return json_response({"status": "ok"})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        await request.body()  # (else its limits would apply in `prepare`, which takes them for a disconnect)
        try:
            await service.prepare(request, service.llm.reset_prefix_cache())
        except EngineStoppedError as error:
            raise api_error(error) from error
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": minipaged.__version__})


def _add_views(app: FastAPI, service: Service) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/")
    async def page() -> Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(live_page(), headers=headers)

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/trace/live")
    async def trace() -> Response:
        return EventStream(service.live.listen())
