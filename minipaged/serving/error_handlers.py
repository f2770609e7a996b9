"""Every error in OpenAI's format, also for a body that does not fit and for a path that does not exist."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minipaged.serving.errors import ApiError
from minipaged.text_io import cut

ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/models")
"""Below "/v1"; one that ends with another comes first."""


def install_handlers(app: FastAPI) -> None:
    """Let an application answer so."""

    @app.exception_handler(ApiError)
    async def failed(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error, request.headers.get("content-type")).response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        meant = _endpoint_at_the_end(request.url.path)
        hint = f"did you mean {meant}?" if meant else "see /openapi.json for what there is"
        messages = {
            404: f"there is no {request.url.path} here; {hint}",
            405: f"{request.url.path} does not take {request.method}; see /openapi.json for what it takes",
        }
        message = messages.get(error.status_code, str(error.detail))
        match error.__cause__:
            case UnicodeDecodeError(object=data, start=at):
                message = f"the body is not UTF-8: byte {data[at]:#04x} at position {at}; send JSON in UTF-8"
            case RecursionError():
                message = "the body is nested too deeply; send flatter JSON"
            case ValueError() as cause if "digits" in str(cause):
                most = sys.get_int_max_str_digits()
                message = f"the body has a number of more than {most:,} digits; send a shorter one"
        return ApiError(error.status_code, message, headers=error.headers).response()


def _endpoint_at_the_end(path: str) -> str | None:
    """Which endpoint a client wants whose base address lacks "/v1", or has more than that."""
    ends = (end for end in ENDPOINTS if path.rstrip("/").endswith(end))
    return next((f"/v1{end}" for end in ends), None)


def _invalid(error: RequestValidationError, content_type: str | None) -> ApiError:
    """The first thing wrong with a body, in one line."""
    errors = error.errors()
    # A field of several types has errors for each: the closest type is meant.
    first = errors[0]["loc"]
    end = next((i for i, part in enumerate(first) if _is_type(str(part))), len(first))
    types: dict[Any, Any] = {}
    for wrong in (wrong for wrong in errors if wrong["loc"][:end] == first[:end]):
        types.setdefault(tuple(part for part in wrong["loc"][end:] if _is_type(str(part))), wrong)
    found = max(types.values(), key=_fit)
    if found["type"] == "json_invalid":
        return ApiError(
            400,
            f"the body is not JSON: {found['ctx']['error']} at position {found['loc'][-1]}",
            code="invalid_json",
        )
    loc = [str(part) for part in found["loc"][1:] if not _is_type(str(part))]
    if found["type"] == "unknown_field":
        loc.append(found["ctx"]["field"])
        name = ".".join(loc)
        return ApiError(400, f"there is no field {name}; {found['ctx']['hint']}", name, "unknown_parameter")
    if isinstance(found["input"], bytes):  # not parsed; what curl -d sends if no header says otherwise
        message = f"the body's Content-Type is {content_type or 'missing'}; send it as application/json"
        return ApiError(400, message)
    if not loc:
        return ApiError(400, "the body is not a JSON object; send one as application/json")
    name = ".".join(loc)
    if found["type"] == "missing":
        return ApiError(400, f"{name} is missing; give it", name, "missing_required_parameter")
    alike = (wrong for wrong in types.values() if _fit(wrong) == _fit(found))
    wanted = " or ".join(dict.fromkeys(_wanted(wrong) for wrong in alike if wrong["type"] != "unknown_field"))
    given = json.dumps(found["input"], default=repr)
    return ApiError(400, f"{name} is {cut(given)}; give {wanted}", name, "invalid_value")


WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
    "too_long": "at most {max_length} entries",
    "greater_than_equal": "a number from {ge}",
    "less_than": "a number below {lt}",
    "none_required": "null, or leave it out",
}
"""What a field takes, in JSON's terms, by kind of error; pydantic's messages use Python's."""


def _wanted(error: Mapping[str, Any]) -> str:
    in_json = WANTED.get(error["type"], "").format(**error.get("ctx", {}))
    wanted = str(error["msg"]).removeprefix("Input should be ")
    return in_json or {"False": "false"}.get(wanted, wanted)


def _fit(error: Mapping[str, Any]) -> tuple[Any, ...]:
    """How far a value matches a type: first by depth, then by its own `type`, then by a field with another
    name there, then by the entries before the wrong one."""
    loc, hint = error["loc"], error.get("ctx", {}).get("hint", "")
    is_near = hint.startswith("did you mean")
    return len(loc), loc[-1] != "type", is_near, tuple(part for part in loc if isinstance(part, int))


def _is_type(part: str) -> bool:
    """Whether a part of a location names a type, as in a union, rather than a field."""
    return part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper()
