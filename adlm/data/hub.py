"""The Hugging Face Hub: whether it can be reached, so that its libraries do not retry for half a minute."""

import os
import socket
import sys
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies

TIMEOUT = 2.0  # seconds


def check_hub() -> bool:
    """Return whether the Hub can be reached; if not, its libraries search their caches alone in this process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    url = urlsplit(getproxies().get("https") or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    reached = threading.Event()

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((url.hostname, url.port or 443), timeout=TIMEOUT).close()
            reached.set()

    thread = threading.Thread(target=connect, daemon=True)  # looking a name up has no time limit of its own
    thread.start()
    thread.join(TIMEOUT)
    if not reached.is_set():
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
        if constants := sys.modules.get("huggingface_hub.constants"):
            constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return reached.is_set()
