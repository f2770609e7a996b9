"""minipaged on a Ray cluster: the server's application, in as many replicas as Ray is told.

    cd docs/examples/cluster && serve run ray_serve:app
    curl -s http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "Once"}'

Each machine needs minipaged[serve] and ray[serve]. Ray chooses a replica by load alone.
"""

import os
from functools import cache

from fastapi import FastAPI
from ray import serve

from minipaged import AsyncLLM
from minipaged.serving.app import create_app
from minipaged.serving.settings import ServerSettings


@cache
def application() -> FastAPI:
    """The application of this replica, with its engine; keys and model from the environment."""
    model = os.environ.get("MINIPAGED_MODEL")  # a directory that each machine has, or a hub id
    keys = tuple(filter(None, [os.environ.get("MINIPAGED_API_KEY")]))
    return create_app(AsyncLLM(model, max_waiting=256), model or "pocket", ServerSettings(api_keys=keys))


def build() -> FastAPI:
    """What Ray calls in each replica (a cached function it would take for the application itself)."""
    return application()


@serve.deployment(num_replicas=2, max_ongoing_requests=512, ray_actor_options={"num_cpus": 1})
@serve.ingress(build)
class Minipaged:
    """One replica; a deployment on GPUs adds "num_gpus": 1."""

    def check_health(self) -> None:
        """Asked by Ray, which starts a replica anew that raises."""
        if ailment := application().state.service.ailment:
            raise RuntimeError(ailment)


app = Minipaged.bind()
