"""`minipaged serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from minipaged import pocket_model
from minipaged.cli.options import Model, Use, check_parts, template_variables
from minipaged.cli.streams import StandardErrorHandler
from minipaged.serving.settings import ServerSettings

MOST_REPLICAS = 64


def serve(
    options: dict[str, Any],
    model: Model = None,
    host: Annotated[str, Option(help="Address to listen on.")] = ServerSettings.host,
    port: Annotated[int, Option(help="Port to listen on; 0 picks a free one.")] = ServerSettings.port,
    api_key: Annotated[
        list[str] | None,
        Option(
            envvar="MINIPAGED_API_KEY",
            help="A key that requests must send; may be repeated. Each key has its own prefix cache.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, Option(help="Name that clients use for the model. [default: the given model, or pocket]")
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None,
        Option(help="Variables for the chat template, as a JSON object; a request's own take precedence."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, Option(help="Allow web pages from this origin to use the server (CORS).")
    ] = None,
    max_waiting: Annotated[
        int, Option(help="Requests that may wait; any further request gets status 429.")
    ] = ServerSettings.max_waiting,
    max_body_bytes: Annotated[
        int, Option(help="Maximum bytes in the body of a request.")
    ] = ServerSettings.max_body_bytes,
    request_timeout: Annotated[
        float, Option(help="Seconds that a request may take.")
    ] = ServerSettings.request_timeout,
    shutdown_timeout: Annotated[
        float, Option(help="Seconds that running requests get to finish at shutdown.")
    ] = ServerSettings.shutdown_timeout,
    replicas: Annotated[
        int, Option(help="Number of servers that share the requests; each has the whole model.")
    ] = 1,
    use: Use = None,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, StandardErrorHandler):
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if not 1 <= replicas <= MOST_REPLICAS:
        raise ValueError(f"replicas is {replicas}; give a number from 1 to {MOST_REPLICAS}")
    try:
        from minipaged.serving.fleet import Fleet
        from minipaged.serving.log_thread import log_thread
        from minipaged.serving.router import Router
        from minipaged.serving.server import bind, make_server, server_of
    except ImportError as error:
        raise ValueError(
            f'serve needs {error.name}; in your clone, run pip install -c constraints.txt -e ".[serve]"'
        ) from error
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(allow_origin or ()),
        default_chat_template_kwargs=template_variables(default_chat_template_kwargs),
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    parts = check_parts(options, use)
    listener = bind(settings)
    name = served_model_name or (pocket_model.NAME if model is None else str(Path(model)))
    address = f"[{host}]" if ":" in host else host
    message = f"Serving {name} at http://{address}:{listener.getsockname()[1]}"
    if replicas > 1:
        fleet = Fleet(replicas, model, name, options, use or (), settings)
        with ExitStack() as at_the_end, listener, fleet:
            at_the_end.enter_context(log_thread())
            router = Router(fleet.replicas, settings)
            server = server_of(router.app, router, settings)
            server.announce = lambda: print(f"{message} with {replicas} replicas", flush=True)
            server.run(sockets=[listener])
        return
    from minipaged.async_llm import AsyncLLM

    with (
        ExitStack() as at_the_end,
        listener,
        AsyncLLM(model, max_waiting=max_waiting, components=parts, **options) as llm,
    ):
        at_the_end.enter_context(log_thread())  # (it ends after the engine, which logs, too)
        server = make_server(llm, name, settings)
        server.announce = lambda: print(message, flush=True)
        server.run(sockets=[listener])
