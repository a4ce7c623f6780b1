"""Files of data, checkpoints and caches: the only place that writes, renames and deletes them.

What is written atomically is, after a kill or a power cut, either the old content or the new one.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from adlm.settings import Stored

if TYPE_CHECKING:
    from torch import Tensor

Content = TypeVar("Content", bound=Stored)

MAX_JSON_BYTES = 2**26  # of a file that describes data, a model or a tokenizer
PART = ".part"  # ends the name of a file that is being written
PARTIAL = ".partial-"  # begins the name of a folder that is being written, or deleted
OPEN_LOCKS: set[IO[bytes]] = set()  # of this process


# Reading.


def hash_file(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first bytes."""
    with path.open("rb") as file:
        content = file if size is None else io.BytesIO(file.read(size))
        return hashlib.file_digest(content, "sha256").hexdigest()


def read_bounded(path: Path) -> str:
    """Return the text of a small file; refuse a large one, which would fill the memory."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes: expected at most {MAX_JSON_BYTES:,}; make or fetch it again"
        )
    return path.read_bytes().decode("utf-8")


def read_json(path: Path, remedy: str = "the file is damaged") -> Any:
    """Read a JSON file."""
    try:
        return json.loads(read_bounded(path))
    # Not JSON, not UTF-8, too large, or too many brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): {remedy}") from error


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; another value has no names."""
    content = read_json(path, remedy)
    return content if isinstance(content, dict) else {}


def read_stored(path: Path, kind: type[Content], remedy: str) -> Content:
    """Read a JSON file as the settings class of its content."""
    return kind.read(read_json(path, remedy), str(path), remedy)


# Writing.


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a whole file, and wait for the disk."""
    with partial_file(path) as part, part.open("wb") as file:
        file.write(content)


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Context manager: the file to write in place of `path`, which it becomes when it is complete;
    an error deletes it."""
    part = path.with_name(path.name + PART)
    try:
        yield part
        sync_path(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode("utf-8"))


def write_tensors(
    path: Path, tensors: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file that everyone can read, as with other files."""
    from safetensors.torch import save_file  # here: it imports torch

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with partial_file(path) as part:
        save_file(contiguous, part, metadata=metadata)
        part.chmod(0o644)  # safetensors writes files that only their owner can read


def append_durably(path: Path, content: bytes) -> None:
    """Append to a file, and wait for the disk; where that fails, the file is as it was before."""
    rest = memoryview(content)
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError as error:  # a full disk; half a line would spoil the next one
            file.truncate(size)
            error.filename = file.name
            raise


def append_line(path: Path, line: str) -> None:
    """Append a line to a log, without waiting for the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def cut_file(path: Path, size: int) -> None:
    """Drop what a file has after its first bytes."""
    os.truncate(path, size)


def remove_file(path: Path) -> None:
    """Delete a file, if it exists."""
    path.unlink(missing_ok=True)


def replace_link(path: Path, target: str) -> None:
    """Point a symbolic link to another target, atomically."""
    new = path.with_name(f".{path.name}-link")
    new.unlink(missing_ok=True)
    new.symlink_to(target, target_is_directory=True)
    os.replace(new, path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file or a folder's entries to the disk: a renamed file survives a power cut only then."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders, and does not need it
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Folders that appear as a whole.


def create_partial_folder(final: Path) -> Path:
    """Create the folder in which the content of `final` is written, without what a kill left there."""
    partial = final.with_name(f"{PARTIAL}{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish_folder(partial: Path, final: Path) -> None:
    """Give a complete folder its name, in place of one that has it, and wait for the disk."""
    for path in [*partial.rglob("*"), partial]:
        sync_path(path)
    remove_folder(final)
    rename_folder(partial, final)


def rename_folder(folder: Path, name: Path) -> None:
    """Rename a folder, and wait for the disk."""
    os.rename(folder, name)
    sync_path(name.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists; it is renamed first, so that a half-deleted one is never listed."""
    if not folder.exists():
        return
    renamed = folder.with_name(f"{PARTIAL}old-{folder.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(folder, renamed)
    shutil.rmtree(renamed)


def remove_partial_folders(parent: Path) -> None:
    """Delete what killed processes were writing into a folder."""
    for partial in parent.glob(f"{PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


# Locks.


@contextmanager
def file_lock(path: Path, message: str) -> Iterator[None]:
    """Context manager: lock a file, creating it if needed, at most until this process ends, whatever
    its children do; ValueError(message) if another process has locked it."""
    if os.name != "posix":
        raise OSError(
            f"{path} cannot be locked on this system: run adlm on Linux or macOS "
            "(on Windows, in WSL)"
        )
    import fcntl

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(message) from None
        OPEN_LOCKS.add(file)
        try:
            yield
        finally:
            OPEN_LOCKS.discard(file)


def _close_locks() -> None:
    while OPEN_LOCKS:
        OPEN_LOCKS.pop().close()  # closing one of two copies does not unlock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)
