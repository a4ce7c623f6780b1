"""The page at /: a text with holes, and the player that shows how they are filled, live."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

from adlm.view.player import read_asset

NAMES = ("docs.js", "page.js", "page.css", "player.js", "player.css")
PAGE_FILES = {"/": "index.html", "/docs": "docs.html", **{f"/{name}": name for name in NAMES}}  # by path
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
# The content security policy of all answers: files of this server and requests to it, nothing else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI) -> None:
    """Serve the page, the list of requests and their files."""
    for path, name in PAGE_FILES.items():
        app.add_route(path, serve_file(name), include_in_schema=False)


def serve_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Make the route of a file: the player's own, or the page's, into which the player's elements are put."""
    if name.startswith("player"):
        content = read_asset(name)
    else:
        content = files("adlm.serve").joinpath("page", name).read_text("utf-8")
        content = content.replace("{{stage}}", read_asset("stage.html"))
    media_type = MEDIA_TYPES[name.rsplit(".")[-1]]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer
