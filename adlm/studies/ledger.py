"""What a long study has finished, a JSON object a line: the same command goes on behind it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Ledger:
    """Finished results by what they depend on. Without a folder nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.found = path, dict[str, dict[str, Any]]()
        if path is None or not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a line without an end was being written when the power went
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                self.found[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} is not one of ours ({error}): take another folder, or delete the line"
                ) from error
        if len(whole) < len(content):
            path.write_bytes(whole)

    def get(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result that was kept for exactly these settings."""
        return self.found.get(key_of(settings))

    def put(self, settings: Mapping[str, Any], result: dict[str, Any]) -> None:
        """Keep a result; it is on the disk when this returns."""
        key = key_of(settings)
        self.found[key] = result
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(json.dumps({"key": key, "settings": settings, "result": result}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def key_of(settings: Mapping[str, Any]) -> str:
    """A name for settings: equal settings, equal names."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
