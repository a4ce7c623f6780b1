"""The Hugging Face Hub: whether it can be reached, so that its libraries do not retry for half a minute; models."""

import os
import re
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT = 2.0  # seconds
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # OWNER/NAME


def check_hub() -> bool:
    """Return whether the Hub can be reached; if not, its libraries search their caches alone in this process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    reached = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError):  # ValueError: not a URL, or not a host's name
            socket.create_connection(find_address(), timeout=TIMEOUT).close()
            reached.set()

    thread = threading.Thread(
        target=connect, daemon=True
    )  # looking a name up has no time limit of its own
    thread.start()
    thread.join(TIMEOUT)
    if not reached.is_set():
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
        for name in ("huggingface_hub.constants", "datasets.config"):
            if module := sys.modules.get(name):
                module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return reached.is_set()


def find_address() -> tuple[str | None, int]:
    """Return the host and port of the Hub, or of the proxy that leads to it."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if (proxy := getproxies().get(url.scheme)) and not proxy_bypass(url.netloc):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname, url.port or (80 if url.scheme == "http" else 443)


def download_files(name: str, *patterns: str) -> Path:
    """Return a repository's folder in the Hub's cache, after downloading its files of these patterns if possible."""
    is_reached = check_hub()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # the Hub's own errors are among these
        reason = (
            str(error).splitlines()[0]
            if is_reached
            else "the Hub cannot be reached, and its cache has none"
        )
        raise FileNotFoundError(reason) from error


def download_model(name: str) -> Path:
    """Return the folder of a model in the Hub's cache; *.bin is downloaded only where there are no safetensors."""
    try:
        folder = download_files(name, "*.json", "*.safetensors")
        return folder if any(folder.rglob("*.safetensors")) else download_files(name, "*.bin")
    except FileNotFoundError as error:
        problem = f"there is no model folder {name!r}, and none of that name on the Hub ({error}): check the name"
        raise FileNotFoundError(problem) from error
