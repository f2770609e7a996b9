"""The health of a replica, looked at again and again; one that is ill gets no requests until it is well."""

from __future__ import annotations

import asyncio
import logging

import httpx

from minipaged.serving.exchange import Replica

logger = logging.getLogger(__name__)

BETWEEN_LOOKS = 1.0
"""Seconds between a replica's health checks."""

PATIENCE = 30.0
"""Seconds a replica has to answer a health check."""


async def watch(replica: Replica, http: httpx.AsyncClient) -> None:
    """Tend a replica and note whether it can serve, until this is cancelled."""
    last_failure = ""
    while True:
        is_healthy = False
        try:
            await replica.tend()
            answer = await http.get(f"{replica.url}/health", timeout=PATIENCE)
            is_healthy = answer.status_code == 200
        except httpx.HTTPError:
            pass
        except Exception as error:  # (a watch that ended would never bring the replica back)
            if repr(error) != last_failure:  # logged once
                logger.exception("The watch of replica %d failed", replica.number)
            last_failure = repr(error)
        if not is_healthy:
            take_out(replica, "it is unhealthy")
        elif not replica.is_up:
            logger.warning("Replica %d is back", replica.number)
            replica.is_up, last_failure = True, ""
        await asyncio.sleep(BETWEEN_LOOKS)


def take_out(replica: Replica, reason: str) -> None:
    """Send it no more requests until it is healthy again; logged once, however many it had."""
    if replica.is_up:
        logger.warning("Replica %d is taken out of service: %s", replica.number, reason)
    replica.is_up = False
