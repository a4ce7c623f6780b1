"""The Hugging Face Hub: whether it can be reached, so that its libraries do not retry for half a minute."""

import os
import socket
import sys
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT = 2.0  # seconds


def check_hub() -> bool:
    """Return whether the Hub can be reached; if not, its libraries search their caches alone in this process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    reached = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError):  # ValueError: not a URL, or not a host's name
            socket.create_connection(find_address(), timeout=TIMEOUT).close()
            reached.set()

    thread = threading.Thread(target=connect, daemon=True)  # looking a name up has no time limit of its own
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
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.netloc):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname, url.port or (80 if url.scheme == "http" else 443)
