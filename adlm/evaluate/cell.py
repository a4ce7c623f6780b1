"""The child's side of `programs`: give up what a candidate must not have, run it and its test, report.

This file is run as a script by an interpreter without site packages; it reads one JSON object from stdin. That the test
came to its end is proved by a word that lies in a pipe until then: leaving early, with whatever exit code, proves
nothing. It keeps accidents and the usual tricks in, not an attacker: candidate and test share one interpreter.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

# Events of sys.audit that end in PermissionError. A hook cannot be taken out again.
REFUSED = (
    "socket.", "subprocess.", "ctypes.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system",
    "os.kill", "pty.spawn", "resource.", "signal.", "os.chmod", "os.chown", "os.link", "os.symlink", "os.rename",
    "os.remove", "os.rmdir", "os.truncate", "os.mkdir", "os.chdir", "os.chflags", "os.lockf", "os.setxattr",
    "os.removexattr", "os.utime", "shutil.", "webbrowser.", "winreg.", "sys.addaudithook", "syslog.", "mmap.",
)  # fmt: skip
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2)
REPORT = 2000  # bytes of a report at most


def leave_network() -> bool:
    """Into a network without any interface, where the system lets us."""
    try:
        if hasattr(os, "unshare"):
            os.unshare(NEW_USER | NEW_NETWORK)
            return True
        import ctypes

        return ctypes.CDLL(None, use_errno=True).unshare(NEW_USER | NEW_NETWORK) == 0
    except (OSError, AttributeError, ImportError):  # no such call, or not ours to make: the hook remains
        return False
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
            del sys.modules[name]


def set_limits(cpu_seconds: int, memory: int, file_size: int) -> None:
    """What the kernel holds us to."""
    wanted = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,  # no process and no thread; root is not held to it
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def take_away() -> None:
    """What no audit event tells of: pipes with names, and the call behind subprocess."""
    import _posixsubprocess

    def refused(*_: object) -> None:
        raise PermissionError("a candidate may not do this: fork_exec")

    _posixsubprocess.fork_exec = refused  # type: ignore[assignment]
    for module in (os, sys.modules["posix"]):
        for name in ("mkfifo", "mknod"):
            if hasattr(module, name):
                delattr(module, name)


def refuse(own: str) -> None:
    """From now on no network, no processes, no files but our own and, to be read, the interpreter's."""
    library = tuple({os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix)})
    inside, writes = os.path.realpath(own) + os.sep, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    readable, sep = (*library, inside), os.sep
    refused, realpath, as_path, string, number = REFUSED, os.path.realpath, os.fsdecode, (str, bytes), int
    is_folder, native = os.path.isdir, ("ctypes", "_ctypes", "_posixsubprocess")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, string):
                where = realpath(as_path(path))
                is_written = isinstance(flags, number) and bool(flags & writes)
                # An open folder is a way to files that this hook is told only the last part of.
                if is_folder(where) or (
                    not where.startswith(inside) and (is_written or not where.startswith(readable))
                ):
                    raise PermissionError(f"a candidate may not open {where}")
        elif event in ("os.listdir", "os.scandir"):
            if isinstance(args[0], string) and not (realpath(as_path(args[0])) + sep).startswith(readable):
                raise PermissionError(f"a candidate may not look into {as_path(args[0])}")
        elif event == "import":
            if args[0] in native:
                raise PermissionError(f"a candidate may not import {args[0]}")
            if isinstance(args[1], string) and not realpath(as_path(args[1])).startswith(library):
                raise PermissionError("a candidate may not load native code of its own")
        elif event.startswith(refused):
            raise PermissionError(f"a candidate may not do this: {event}")

    sys.addaudithook(hook)


def tried(given: dict[str, Any]) -> tuple[str, str]:
    """What becomes of candidate and test: how it ended, and why."""
    space: dict[str, Any] = {"__name__": "candidate"}
    at = "candidate"
    try:
        exec(compile(given["program"], "candidate", "exec", dont_inherit=True), space)
        at = "test"
        exec(compile(given["test"], "test", "exec", dont_inherit=True), space)
        space["check"](space[given["entry_point"]])
    except MemoryError:
        return "memory", f"{at}: MemoryError"
    except SyntaxError as error:
        return "syntax", f"{at}: {type(error).__name__}: {error}"
    except BaseException as error:  # sys.exit is one way to fail among others
        return "failed", f"{at}: {type(error).__name__}: {error}"
    return "passed", ""


def main() -> None:
    """Read, confine, run, report."""
    given = json.load(sys.stdin)
    proof, answer = given["proof"], given["answer"]
    own = os.getcwd()
    is_alone = leave_network() if given["leave_network"] else False
    os.write(answer, b"alone\n" if is_alone else b"hook\n")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    write, read = os.write, os.read
    set_limits(given["cpu_seconds"], given["memory"], given["file_size"])
    take_away()
    refuse(own)
    status, why = tried(given)
    word = read(proof, 64).decode() if status == "passed" else "-"
    write(answer, f"{status} {word} {why}".encode("utf-8", "replace")[:REPORT])
    os._exit(0)  # nothing that the candidate left behind runs


if __name__ == "__main__":
    main()
