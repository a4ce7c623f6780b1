"""The HTTP server on Ray Serve, with replicas on one or several machines: `serve run adlm.serve.ray_app:build`."""

import os
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.schema import LoggingConfig

from adlm.bundled import DEFAULT
from adlm.serve.app import create_app
from adlm.serve.engine import EngineLimits
from adlm.text.lm import load


class RayOptions(BaseModel):
    """Options of the deployment; `cpus` and `gpus` are what Ray reserves for a replica."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = DEFAULT
    min_replicas: int = Field(1, ge=1)
    max_replicas: int | None = None  # by default min_replicas: no scaling
    device: Literal["cpu", "cuda"] = "cpu"
    cpus: float = Field(1, gt=0)
    gpus: float = Field(1, gt=0)  # with device cuda; 0.5: two replicas share a GPU
    max_rows: int = Field(64, ge=1)
    max_waiting: int = Field(256, ge=1)
    deterministic: bool = False
    network: str | None = None  # module:object, of a model folder whose network is not built in
    objective: str | None = None  # likewise
    api_key: str | None = Field(default_factory=lambda: os.environ.get("ADLM_API_KEY"), repr=False)


@serve.ingress()
class Replica:
    """A process with the model and its app."""

    def __init__(self, options: RayOptions) -> None:
        lm = load(
            options.model,
            device=options.device,
            deterministic=options.deterministic,
            network=options.network,
            objective=options.objective,
        )
        lm.generate(max_new_tokens=1, steps=None if lm.row_format.is_causal else 1)  # warm-up
        limits = EngineLimits(max_rows=options.max_rows, max_waiting=options.max_waiting)
        self.server = create_app(lm, limits=limits, api_key=options.api_key)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the app, which Ray starts and stops."""
        return self.server

    def check_health(self) -> None:
        """Raise an error if the engine does not answer: Ray then replaces this replica."""
        if not self.server.state.engine.is_ready:
            raise RuntimeError("the engine has stopped")


def build(options: RayOptions) -> serve.Application:
    """Describe the deployment. Replicas are added while each has more requests than its batch has rows."""
    max_replicas = options.max_replicas or options.min_replicas
    if max_replicas < options.min_replicas:
        raise ValueError(
            f"max_replicas is {max_replicas}: expected at least min_replicas, {options.min_replicas}"
        )
    resources: dict[str, Any] = {"num_cpus": options.cpus}
    if options.device == "cuda":
        resources["num_gpus"] = options.gpus
    scaling = {"min_replicas": options.min_replicas, "max_replicas": max_replicas}
    deploy = serve.deployment(
        name="adlm",
        ray_actor_options=resources,
        autoscaling_config={**scaling, "target_ongoing_requests": options.max_rows},
        max_ongoing_requests=2
        * (options.max_rows + options.max_waiting),  # a full queue is answered by the app: 429
        logging_config=LoggingConfig(enable_access_log=False),
    )
    return deploy(Replica).bind(options)
