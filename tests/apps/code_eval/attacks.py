"""What a hostile program tries in the sandbox: every function returns how much of it worked.

`place` has the facts about the host. The sandboxed interpreter runs this file's source: standard library only.
"""

# ruff: noqa: SIM115
import ctypes
import mmap
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MAX_ALLOWED = {
    "allocate": 256,
    "map_memory": 256,
    "fill_tmp": 16,
}  # MiB; everything else must reach nothing
libc = ctypes.CDLL(None, use_errno=True)


def count(action: Callable[[int], object], times: int = 1) -> int:
    """How many times an action works before it fails."""
    for number in range(times):
        try:
            action(number)
        except (OSError, MemoryError, RuntimeError, ValueError, sqlite3.Error):
            return number
    return times


def read_file(place: dict[str, Any]) -> int:
    paths = (place["secret"], f"/proc/self/root{place['secret']}", f"/proc/{place['pid']}/environ")
    return sum(count(lambda _, path=path: open(path, "rb").read()) for path in paths)  # type: ignore[misc]


def read_by_ctypes(place: dict[str, Any]) -> int:
    return int(libc.open(place["secret"].encode(), 0) >= 0)


def read_by_sqlite(place: dict[str, Any]) -> int:
    address = f"file:{place['secret']}?mode=ro"
    done = count(lambda _: sqlite3.connect(address, uri=True))
    return done + count(
        lambda _: sqlite3.connect("file::memory:", uri=True).execute("attach ? as x", (address,))
    )


def read_by_subinterpreter(place: dict[str, Any]) -> int:
    interpreters = __import__(
        "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    )
    code = f"open('copy', 'w').write(open({place['secret']!r}).read())"

    def run_code(_: int) -> None:
        interpreters.run_string(interpreters.create(), code)
        open("copy").read()

    return count(run_code)


def connect(place: dict[str, Any]) -> int:
    addresses = [("127.0.0.1", place["port"]), ("1.1.1.1", 53)]
    done = sum(count(lambda _, at=each: socket.create_connection(at, 2)) for each in addresses)  # type: ignore[misc]
    local = socket.socket(socket.AF_UNIX)
    done += count(lambda _: local.connect("\0" + place["name"]))
    return done + len([name for _, name in socket.if_nameindex() if name != "lo"])


def write_files(place: dict[str, Any]) -> int:
    folders = [
        "",
        "/usr",
        "/usr/lib",
        "/lib",
        "/root",
        "/home",
        "/etc",
        "/dev",
        "/dev/shm",
        "/var/tmp",
        "/run",
        "/mnt",
    ]
    folders += [sys.base_prefix, os.path.dirname(sys.base_prefix), os.path.dirname(place["secret"])]
    paths = [f"{folder}/{place['name']}" for folder in folders]
    done = sum(count(lambda _, path=path: open(path, "w").write("x")) for path in paths)  # type: ignore[misc]
    done += sum(libc.mkdir(path.encode(), 0o777) == 0 for path in paths)
    return done + count(lambda _: sqlite3.connect(paths[-3]).execute("create table t (x)"))


def remount(place: dict[str, Any]) -> int:
    again, bind, detach, done = 32, 4096, 2, 0
    for path in (b"/", b"/usr", b"/tmp", sys.base_prefix.encode()):
        done += sum(
            libc.mount(b"none", path, None, flags, None) == 0 for flags in (again, again | bind)
        )
        done += (libc.umount2(path, detach) == 0) + (
            libc.mount(b"/usr", path, None, bind, None) == 0
        )
    return (
        done + (libc.mount(b"proc", b"/tmp", b"proc", 0, None) == 0) + (libc.chroot(b"/tmp") == 0)
    )


def enter_namespaces(place: dict[str, Any]) -> int:
    user, mount, net = 0x10000000, 0x20000, 0x40000000
    done = sum(libc.unshare(kinds) == 0 for kinds in (user, mount, net, user | mount, user | net))
    clone = 56 if os.uname().machine == "x86_64" else 220
    return done + (libc.syscall(clone, user | signal.SIGCHLD, 0, 0, 0, 0) > 0)


def gain_rights(place: dict[str, Any]) -> int:
    raised = sum(
        libc.prctl(47, 2, number, 0, 0) == 0 for number in range(41)
    )  # ambient capabilities
    done = count(lambda _: os.setuid(0)) + count(lambda _: os.setgid(0)) + raised
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
    most = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    return done + sum(count(lambda _, kind=kind: resource.setrlimit(kind, most)) for kind in kinds)  # type: ignore[misc]


def send_signals(place: dict[str, Any]) -> int:
    done = count(lambda _: os.kill(place["pid"], signal.SIGKILL))
    done += count(lambda _: signal.pidfd_send_signal(os.pidfd_open(place["pid"]), signal.SIGKILL))
    return done + sum(libc.ptrace(16, process, 0, 0) == 0 for process in (place["pid"], 1))


def start_processes(place: dict[str, Any]) -> int:
    def fork(_: int) -> None:
        if os.fork() == 0:
            time.sleep(60)

    def fork_by_ctypes(_: int) -> None:
        if (process := libc.fork()) == 0:
            libc.pause()
        if process < 0:
            raise OSError

    done = count(fork, 200) + count(fork_by_ctypes, 200)
    done += count(lambda _: subprocess.Popen(["/usr/bin/sleep", "60"]), 200)
    return done + count(
        lambda _: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(), 200
    )


def allocate(place: dict[str, Any]) -> int:
    kept: list[bytearray] = []
    at_once = count(lambda _: kept.append(bytearray(2**33))) << 13
    return at_once + count(lambda _: kept.append(bytearray(2**20)), 2**13)


def map_memory(place: dict[str, Any]) -> int:
    kept: list[mmap.mmap] = []
    return count(lambda _: kept.append(mmap.mmap(-1, 2**20)), 2**13)


def share_memory(place: dict[str, Any]) -> int:
    return sum(libc.shmget(0, 2**20, 0o1600) >= 0 for _ in range(3)) + count(
        lambda n: os.memfd_create(str(n)), 3
    )


def fill_tmp(place: dict[str, Any]) -> int:
    file = os.open("large", os.O_RDWR | os.O_CREAT)
    large = count(lambda _: os.ftruncate(file, 2**33)) + count(
        lambda _: os.posix_fallocate(file, 0, 2**33)
    )
    return (large << 13) + count(lambda number: open(str(number), "wb").write(bytes(2**20)), 2**13)


ATTACKS = (
    read_file, read_by_ctypes, read_by_sqlite, read_by_subinterpreter, connect, write_files, remount, enter_namespaces,
    gain_rights, send_signals, start_processes, allocate, map_memory, share_memory, fill_tmp,
)  # fmt: skip
