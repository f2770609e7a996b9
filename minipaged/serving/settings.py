"""The server's own settings; those of the engine are `EngineConfig`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

ORIGIN = r"null|file://|https?://[^/?#\sA-Z]+|(?!https?:)[a-z][a-z0-9+.-]*://[^/\s]+"
"""What a browser, an extension or an app with web pages may send as its origin."""


class ServerSettingsError(ValueError):
    """An invalid setting; the message names it, its value and the fix."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the server listens, who may use it, and its limits.

    Raises:
        ServerSettingsError: a value out of range, or an address that others can reach and no key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # each request must have one of them; each has its own cache
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use the server
    default_chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # a request's own take precedence
    max_waiting: int = 256  # requests; more get status 429
    max_body_bytes: int = 4 << 20
    request_timeout: float = 600.0  # seconds that a request may take, reading its body included
    shutdown_timeout: float = 30.0  # seconds that running requests get to finish

    def __post_init__(self) -> None:
        for name, least in {"port": 0, "max_waiting": 1, "max_body_bytes": 1}.items():
            if (value := getattr(self, name)) < least:
                raise ServerSettingsError(f"{name} is {value}; give at least {least}")
        if self.port > 65535:
            raise ServerSettingsError(f"port is {self.port}; give at most 65535")
        for name in ("request_timeout", "shutdown_timeout"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ServerSettingsError(f"{name} is {value}; give a number of seconds above 0")
        for key in self.api_keys:
            if not re.fullmatch("[!-~]+", key):
                raise ServerSettingsError(
                    "an API key is empty or has a character that headers do not allow; give --api-key "
                    "(or MINIPAGED_API_KEY) printable ASCII characters without spaces"
                )
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(ORIGIN, origin):
                raise ServerSettingsError(
                    f"allowed origin is {origin!r}, which no browser sends; give --allow-origin a scheme and "
                    "a host in lower case, without a path, as in http://127.0.0.1:3000, or *"
                )
        if not self.api_keys and not is_loopback(self.host):
            raise ServerSettingsError(
                f"host is {self.host!r}, which other machines can reach; "
                "give --api-key, or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
