"""Runs programs that a model wrote in bubblewrap sandboxes, against tests that they cannot read or influence.

One sandbox runs the candidate and answers calls of its function; another runs the problem's own program and test and
calls the candidate through a pipe, in JSON. docs/code.md has the reasons and the limits. This file imports the standard
library only: the sandboxed interpreters run its source.
"""

import builtins
import contextlib
import functools
import json
import math
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOBODY = 65534
SEARCH_PATH = (
    "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"  # of bwrap, setpriv, unshare, sh and mount
)
MAX_REASON = 2000  # characters
MAX_FILE_SIZE = 2**20
TMP_SIZE = 16 * 2**20
ENVIRONMENT = {"PYTHONHASHSEED": "0", "HOME": "/tmp", "TMPDIR": "/tmp", "LC_ALL": "C.UTF-8"}
NAMESPACES = ("--unshare-user", "--unshare-all", "--disable-userns", "--cap-drop", "ALL")
REMEDY = (
    "install bubblewrap 0.8 or later (apt-get install bubblewrap) and allow user namespaces (sysctl "
    "user.max_user_namespaces, kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined), or use --unsafe (unsafe=True), "
    "which protects nothing, on a machine without anything of value"
)
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
REFUSED_CALLS = {  # memory that no limit counts, and what no solution needs; numbers on x86_64, aarch64
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279), "ptrace": (101, 117),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a candidate may use: seconds of wall-clock time, bytes of address space."""

    seconds: float = 5.0
    memory: int = 512 * 2**20

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 3600:
            raise ValueError(
                f"seconds={self.seconds:g} must be between 0 and 3600: choose another time limit"
            )
        if self.memory < 64 * 2**20:
            raise ValueError(
                f"memory={self.memory / 2**20:g} MiB must be at least 64 MiB, what an interpreter needs"
            )


def run_program(
    program: str,
    reference: str,
    test: str,
    entry_point: str,
    limits: Limits,
    *,
    unsafe: bool = False,
) -> dict[str, Any]:
    """Run `check(entry_point)` of a test against a candidate program; status (passed, failed, syntax, memory, time,
    died or unsupported), reason and seconds. `reference` is the problem's own program."""
    bounds = {"cpu": math.ceil(limits.seconds) + 1, "memory": limits.memory}
    job = {
        "program": program,
        "reference": reference,
        "test": test,
        "entry_point": entry_point,
        "limits": bounds,
    }
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        start = functools.partial(start_process, folder=folder) if unsafe else start_sandbox
        ends = requests, asking, answers, answering = [*os.pipe(), *os.pipe()]
        try:
            channel, streams = (answers, asking), (requests, answering, subprocess.DEVNULL)
            tester = stack.enter_context(
                start(build_call("run_test", channel), [subprocess.PIPE] * 3, channel)
            )
            candidate = stack.enter_context(start(build_call("serve_candidate"), streams))
        finally:
            for end in ends:
                os.close(end)
        try:
            output, messages = tester.communicate(json.dumps(job).encode(), timeout=limits.seconds)
            status, reason = (
                json.loads(output)
                if output
                else ("died", messages.decode("utf-8", "replace")[-500:])
            )
        except subprocess.TimeoutExpired:
            status, reason = "time", ""
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # its pipe is closed, but it did not end
            candidate.wait(timeout=0.5 if status == "died" else 0)
        code = candidate.returncode or 0
    number = -code if code < 0 else code - 128  # bubblewrap exits with 128 + signal
    if status == "time" or (status == "died" and number == signal.SIGXCPU):
        status, reason = "time", f"longer than {limits.seconds:g} seconds"
    elif status == "died":
        reason = f"ended before its test did ({f'signal {number}' if number > 0 else f'exit code {code}'}) {reason}"
    return {"status": status, "reason": reason.strip(), "seconds": time.perf_counter() - began}


def build_call(function: str, descriptors: Sequence[int] = ()) -> list[str]:
    """The command that calls one function of this file in the base interpreter, without site packages."""
    code = f"{Path(__file__).read_text('utf-8')}\n{function}(*{list(descriptors)})"
    return [
        os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        "-s",
        "-S",
        "-P",
        "-B",
        "-c",
        code,
    ]


@contextlib.contextmanager
def start_process(
    command: Sequence[str],
    streams: Sequence[int],
    descriptors: Sequence[int] = (),
    *,
    folder: str = "/",
) -> Iterator[subprocess.Popen[bytes]]:
    """A context manager that starts a command in its own session and folder, which protects nothing, and kills it."""
    names = ENVIRONMENT | {"HOME": folder, "TMPDIR": folder, "PATH": SEARCH_PATH}
    pipes: dict[str, Any] = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
    process = subprocess.Popen(
        command, **pipes, cwd=folder, env=names, pass_fds=descriptors, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
            os.killpg(process.pid, signal.SIGKILL)  # what runs in a sandbox dies with bubblewrap
        process.kill()
        process.communicate()


@contextlib.contextmanager
def start_sandbox(
    command: Sequence[str], streams: Sequence[int], descriptors: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A context manager that starts a command in a sandbox, and kills it."""
    prefix = source = os.path.realpath(sys.base_prefix)
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    before = drop if os.geteuid() == 0 else []
    words = [
        "bwrap",
        *NAMESPACES,
        "--new-session",
        "--die-with-parent",
        "--clearenv",
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    for path in map(str, sorted(Path("/").glob("lib*"))):
        words += (
            ["--symlink", os.readlink(path), path]
            if os.path.islink(path)
            else ["--ro-bind", path, path]
        )
    if not Path(prefix).is_relative_to("/usr"):
        if before:  # nobody may not enter root's folders: bind the prefix elsewhere, in a mount namespace of our own
            source = "/mnt"
            before = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                'mount --bind "$0" /mnt && exec "$@"',
                prefix,
                *before,
            ]
        words += ["--ro-bind", source, prefix]
    words += ["--size", str(TMP_SIZE), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in (ENVIRONMENT | {"LD_LIBRARY_PATH": f"{prefix}/lib"}).items():
        words += ["--setenv", name, value]
    reading, writing = os.pipe()
    if program := build_syscall_filter():
        os.write(writing, program)
        words += ["--seccomp", str(reading)]
    os.close(writing)
    try:
        with start_process(
            [*before, *words, *command], streams, [*descriptors, reading]
        ) as process:
            yield process
    finally:
        os.close(reading)


def build_syscall_filter() -> bytes:
    """A seccomp program that refuses REFUSED_CALLS and foreign architectures; empty on other machines."""
    if platform.machine() not in ARCHITECTURES:
        return b""
    architecture, column = ARCHITECTURES[platform.machine()]
    load, equal, at_least, give, refuse = (
        0x20,
        0x15,
        0x35,
        0x06,
        0x00050001,
    )  # BPF operations; errno EPERM
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give, 0, 0, 0x80000000),
        (load, 0, 0, 0),
    ]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # x32
    for numbers in REFUSED_CALLS.values():
        program += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *each) for each in [*program, (give, 0, 0, 0x7FFF0000)])


@functools.cache
def find_sandbox_problem() -> str | None:
    """Why no sandbox can run here, with the remedy, or None: runs `true` and the interpreter in one."""
    if Path.home().is_relative_to(os.path.realpath(sys.base_prefix)):
        return f"the interpreter's prefix {sys.base_prefix} holds the home folder: install Python elsewhere"
    for command in (["/usr/bin/true"], build_call("platform.machine")):
        try:
            with start_sandbox(command, [subprocess.PIPE] * 3) as process:
                _, messages = process.communicate(timeout=60)
            if process.returncode:
                raise OSError(
                    messages.decode("utf-8", "replace").strip() or f"exit code {process.returncode}"
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the sandbox cannot run {command[0]} ({error}): {REMEDY}"
    return None


# What runs inside


ERROR_STATUSES = dict.fromkeys(("SyntaxError", "IndentationError", "TabError"), "syntax") | {
    "MemoryError": "memory"
}
NAMED: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, bytes, bytearray, complex)
}


class CandidateEndedError(Exception):
    """The other end of a channel is closed."""


def serve_candidate() -> None:
    """The candidate's process: run the program, then answer calls of its function."""
    receive, send = open_channel(os.dup(0), os.dup(1))
    for stream in (0, 1):
        os.dup2(2, stream)  # /dev/null
    job = receive()
    set_limits(**job["limits"])
    space: dict[str, Any] = {"__name__": "candidate"}
    try:
        exec(compile(job["program"], "candidate", "exec", dont_inherit=True), space)
        function = space[job["entry_point"]]
    except BaseException as error:  # sys.exit is one way to fail among others
        return send([type(error).__name__, str(error)])
    send(["ready", ""])
    while True:
        arguments, named = decode(receive())
        try:
            reply = ["returned", encode((function(*arguments, **named), arguments))]
        except BaseException as error:
            reply = ["raised", [type(error).__name__, str(error)[:MAX_REASON]]]
        send(reply)


def run_test(reading: int, writing: int) -> None:
    """The test's process: let the test call the candidate, and print how that ended."""
    job = json.load(sys.stdin)
    set_limits(**job["limits"])
    status, reason = "died", ""
    with contextlib.suppress(CandidateEndedError):
        status, reason = judge_candidate(job, *open_channel(reading, writing))
    print(json.dumps([status, reason[:MAX_REASON]]))


def judge_candidate(
    job: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], None]
) -> tuple[str, str]:
    """How the test of a candidate ends, and why."""
    unsupported: list[str] = []

    def call_candidate(*arguments: Any, **named: Any) -> Any:
        try:
            request = encode((arguments, named))
        except TypeError as error:
            unsupported.append(f"the test hands over an argument {error}")
            raise
        send(request)
        kind, content = receive()
        if kind == "raised":
            error_type = getattr(builtins, content[0], None)
            if isinstance(error_type, type) and issubclass(error_type, Exception):
                raise error_type(content[1])
            raise RuntimeError(f"{content[0]}: {content[1]}")
        result, changed = decode(content)
        for mine, theirs in zip(
            arguments, changed, strict=True
        ):  # a function may change its arguments
            if isinstance(mine, list):
                mine[:] = theirs
            elif isinstance(mine, dict | set):
                mine.clear()
                mine.update(theirs)
        return result

    send({name: job[name] for name in ("program", "entry_point", "limits")})
    kind, reason = map(str, receive())
    if kind != "ready":
        return ERROR_STATUSES.get(kind, "failed"), f"candidate: {kind}: {reason}"
    space: dict[str, Any] = {"__name__": "problem"}
    try:
        exec(compile(job["reference"], "problem", "exec", dont_inherit=True), space)
        space[job["entry_point"]] = call_candidate
        exec(compile(job["test"], "test", "exec", dont_inherit=True), space)
        check = space["check"]
    except Exception as error:
        return (
            "unsupported",
            f"the problem's own program or test does not run: {type(error).__name__}: {error}",
        )
    try:
        check(call_candidate)
    except CandidateEndedError:
        raise
    except MemoryError:
        return "memory", "test: MemoryError"
    except BaseException as error:
        return (
            ("unsupported", unsupported[0])
            if unsupported
            else ("failed", f"test: {type(error).__name__}: {error}")
        )
    return "passed", ""


def open_channel(reading: int, writing: int) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Functions that receive and send lines of JSON."""
    source, sink = os.fdopen(reading, "rb"), os.fdopen(writing, "wb", buffering=0)

    def receive() -> Any:
        if not (line := source.readline()).endswith(b"\n"):
            raise CandidateEndedError
        return json.loads(line)

    def send(message: Any) -> None:
        content = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while content:
                content = content[sink.write(content) :]
        except BrokenPipeError:
            raise CandidateEndedError from None

    return receive, send


def encode(value: Any) -> Any:
    """A builtin value as JSON, named where JSON has no such type; instances of subclasses become the builtin type."""
    if value is None:
        return None
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    for name, kind in NAMED.items():
        if isinstance(value, kind):
            if kind is complex:
                return [name, [value.real, value.imag]]
            return [name, [encode(each) for each in (value.items() if kind is dict else value)]]
    raise TypeError(f"of type {type(value).__name__}, and only builtin values can be sent")


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if not isinstance(value, list):
        return value
    name, content = value
    return (
        complex(*content) if name == "complex" else NAMED[name]([decode(each) for each in content])
    )


def set_limits(cpu: int, memory: int) -> None:
    """Set resource limits that cannot be raised again; no process and no thread can be started."""
    import resource  # Windows has none, and imports this file

    sys.set_int_max_str_digits(0)
    limits = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: MAX_FILE_SIZE,
    }
    limits |= {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 0}
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
