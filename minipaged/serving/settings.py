"""The server's own settings; those of the engine are `EngineConfig`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any


class ServerSettingsError(ValueError):
    """A setting that cannot work; the message names it, its value and the fix."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the server listens, who may use it, and how much of it.

    Raises:
        ServerSettingsError: a value out of its range, or an address that others reach and no key.
    """

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8000, "Port to listen on.")
    api_keys: tuple[str, ...] = _option(
        (), "Keys, one of which each request must have; each has its own cache."
    )
    allowed_origins: tuple[str, ...] = _option((), "Web pages of these origins may use the server.")
    max_waiting: int = _option(256, "Requests that may wait; more are told to come back (429).")
    max_body_bytes: int = _option(4 << 20, "Maximum bytes in the body of a request.")
    request_timeout: float = _option(600.0, "Seconds a request may take, reading its body included.")
    shutdown_timeout: float = _option(30.0, "Seconds that running requests get to finish at shutdown.")

    def __post_init__(self) -> None:
        for name, least in {"port": 0, "max_waiting": 1, "max_body_bytes": 1}.items():
            if getattr(self, name) < least:
                raise ServerSettingsError(f"{name} is {getattr(self, name)}; give at least {least}")
        if self.port > 65535:
            raise ServerSettingsError(f"port is {self.port}; give at most 65535")
        for name in ("request_timeout", "shutdown_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ServerSettingsError(
                    f"{name} is {getattr(self, name)}; give a number of seconds above 0"
                )
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ServerSettingsError("an API key is empty or has a character that headers do not allow")
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
