"""`adlm serve`: the HTTP server."""

import signal
import socket
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.output import status_console
from adlm.errors import install_command

SECONDS_TO_DRAIN = 30
MODELS_HELP = f"{options.MODEL_HELP} Several can be compared."
PLUGIN_HELP = "A sampler of your own, module:object, that requests may name; repeatable."
KEY_HELP = "Key that clients must send. [default: none]"


@options.add_options()
def serve(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help=MODELS_HELP)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="ADLM_API_KEY", help=KEY_HELP)] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Texts sampled at once.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Texts in the queue; more are answered with 429.")
    ] = 256,
    plugin: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:OBJECT", help=PLUGIN_HELP)
    ] = None,
    deterministic: options.Deterministic = False,
    *,
    loading: options.LoadOptions,
) -> None:
    """Serve models over HTTP: OpenAI's completions API and, at /, a page; prints the address when ready."""
    if missing := [
        name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None
    ]:
        raise ImportError(f"adlm serve needs {missing[0]}: {install_command('serve')}")
    import uvicorn

    from adlm.bundled import DEFAULT
    from adlm.diffusion.samplers import register_sampler
    from adlm.serve.app import create_app
    from adlm.serve.engine import EngineLimits

    for target in plugin or []:
        register_sampler(target)
    if host not in ("127.0.0.1", "::1", "localhost") and api_key is None:
        status_console().print(
            f"warning: {host} is open to the network without an API key: set ADLM_API_KEY"
        )
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        problem = f"{host} port {port} cannot be used ({error.strerror})"
        raise ValueError(f"{problem}: give another --host or --port") from None
    lm, *others = loading.load_models(models or [DEFAULT], deterministic=deterministic)
    limits = EngineLimits(max_rows=max_rows, max_waiting=max_waiting)
    app = create_app(lm, limits=limits, api_key=api_key, others=others)
    for each in (lm, *others):
        each.generate(max_new_tokens=1, steps=None if each.row_format.is_causal else 1)  # warm-up
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=SECONDS_TO_DRAIN, server_header=False
    )

    class Server(uvicorn.Server):
        """Prints the address when it accepts connections, and when it stops, what it waits for."""

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            address = listener.getsockname()
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            typer.echo(
                f"serving {', '.join(each.name for each in (lm, *others))} on http://{shown}:{address[1]}"
            )

        def handle_exit(self, sig: int, frame: Any) -> None:
            """Wait for open requests at a first signal, and cancel them at a Ctrl-C after it."""
            requests = tuple(app.state.requests)
            if requests and self.should_exit and sig == signal.SIGINT:
                typer.echo(
                    f"stopping at once: {len(requests)} request(s) end with an error", err=True
                )
                for task in requests:
                    task.get_loop().call_soon_threadsafe(task.cancel)
                return
            super().handle_exit(sig, frame)
            if requests:
                typer.echo(
                    f"waiting for {len(requests)} request(s) to end: press Ctrl-C to stop at once",
                    err=True,
                )

    Server(config).run(sockets=[listener])
