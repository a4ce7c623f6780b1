"""The sandbox: what a program inside can reach, for root and for an ordinary user, and how its verdict is made."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adlm.apps.code_eval import sandbox
from adlm.apps.code_eval.sandbox import Limits, decode, encode, find_sandbox_problem, run_program
from tests.apps.code_eval import attacks

REFERENCE = "def double(x):\n    return 2 * x\ndef total(numbers):\n    return sum(numbers)\n"
TEST = "def check(total):\n    assert total([1, 2]) == 3\n    assert total([4, 5, 6]) == 15\n"
SHORT = Limits(seconds=1.5, memory=256 * 2**20)
SYSTEM_PYTHON = "/usr/bin/python3"
ORDINARY_USER = 54321
Run = Callable[..., dict[str, Any]]


def require_sandbox() -> None:
    """Skip where no sandbox can run; with ADLM_ALL=1 that is a failure, unless ADLM_NO_SANDBOX=1."""
    if problem := find_sandbox_problem():
        if os.environ.get("ADLM_ALL") == "1" and os.environ.get("ADLM_NO_SANDBOX") != "1":
            pytest.fail(problem)
        pytest.skip(problem)


@pytest.fixture(params=["sandbox", "unsafe"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "sandbox":
        require_sandbox()

    def run_body(
        body: str, limits: Limits = SHORT, *, test: str = TEST, before: str = ""
    ) -> dict[str, Any]:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        program = f"{before}\ndef total(numbers):\n{lines}"
        return run_program(
            program, REFERENCE, test, "total", limits, unsafe=request.param == "unsafe"
        )

    return run_body


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("return sum(numbers)", "passed", ""),
        ("print('a' * 2**18)\nreturn sum(numbers)", "passed", ""),
        ("return 0", "failed", "test: AssertionError"),
        ("return 1 / 0", "failed", "test: ZeroDivisionError: division by zero"),
        ("return (", "syntax", "candidate: SyntaxError"),
        ("import time\ntime.sleep(60)", "time", "longer than 1.5 seconds"),
        ("return len(bytearray(2**30))", "memory", "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(2**24))", "memory", "MemoryError"),
        ("import sys\nsys.exit(0)", "failed", "SystemExit: 0"),
        ("import os\nos._exit(0)", "died", "ended before its test did (exit code 0)"),
        ("import os\nos.abort()", "died", "signal 6"),
        ("def f(): return f()\nreturn f()", "failed", "RecursionError"),
        ("return input()", "failed", "EOFError"),
        ("open('big', 'wb').write(bytes(2**22))", "failed", "OSError"),
        ("import torch", "failed", "ModuleNotFoundError"),
        ("return object()", "failed", "of type object, and only builtin values"),
    ],
)
def test_how_a_candidate_ends(run: Run, body: str, status: str, reason: str) -> None:
    result = run(body, SHORT if status == "time" else replace(SHORT, seconds=10))
    assert (result["status"], reason in result["reason"]) == (status, True), result
    assert result["seconds"] < SHORT.seconds + 5


ALWAYS_EQUAL = "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = None"
WRITE = "for end in range(64):\n  try: os.write(end, text)\n  except OSError: pass\n"
VERDICT = 'import os\ntext = b\'["passed", ""]\\n\'\n'
REPLY = (
    "import os, json\n"
    "text = json.dumps(['returned', ['tuple', [3, ['tuple', [['list', []]]]]]]).encode() + b'\\n'\n"
)
FIND = """
import gc, sys
def find(reverse):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if reverse[::-1] in str(value)[:20000]: return 1
        frame = frame.f_back
    return sum(reverse[::-1] in str(each)[:9999] for each in gc.get_objects() if isinstance(each, (list, dict, tuple)))
"""


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("import builtins\nbuiltins.exec = lambda *_: None", "return 0"),
        ("import builtins\nbuiltins.compile = lambda *_, **__: 'pass'", "return 0"),
        ('import builtins\nbuiltins.print = lambda *_: print(\'["passed", ""]\')', "return 0"),
        ('import sys, io\nsys.stdout = io.StringIO(\'["passed", ""]\')', "return 0"),
        ("import sys\nsys.exit(0)", "return 0"),
        ("import os\nos._exit(0)", "return 0"),
        ('import atexit\natexit.register(print, \'["passed", ""]\')', "raise SystemExit(0)"),
        ("import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})", "return 0"),
        ("import sys\nsys.excepthook = lambda *_: None", "raise KeyboardInterrupt"),
        ("", f"{VERDICT}{WRITE}return 0"),
        ("", f"{REPLY}text = text * 9\n{WRITE}return 0"),
        ("", "import os\nos.closerange(0, 64)\nwhile True: pass"),
        (ALWAYS_EQUAL, "return Equal(7)"),
        ("import __main__\n__main__.encode = lambda value: True", "return 0"),
        ("import __main__\n__main__.judge_candidate = lambda *_: ('passed', '')", "return 0"),
    ],
)
def test_a_forged_pass_does_not_pass(run: Run, before: str, body: str) -> None:
    assert run(body, before=before)["status"] in ("failed", "died", "time")


def test_the_candidate_never_holds_the_test(run: Run) -> None:
    test = "EXPECTED = 'zqxjvk'\ndef check(total):\n    raise ValueError(total([4]))"
    result = run(
        "return find('kvjxqz'), find('srebmun')", before=FIND, test=test
    )  # not the value, but its own program
    hidden, own = eval(result["reason"].removeprefix("test: ValueError: "))
    assert hidden == 0 < own


@pytest.mark.parametrize(
    ("body", "test", "status", "reason"),
    [
        ("numbers.sort()", "x = [3, 1]; f(x); assert x == [1, 3]", "passed", ""),
        (
            "return sum(numbers)",
            "try: f(1)\n  except TypeError: return\n  assert False",
            "passed",
            "",
        ),
        (
            "return 1",
            "try: f(1)\n  except TypeError: return\n  assert False",
            "failed",
            "AssertionError",
        ),
        ("return 1", "assert double(f([0])) == 2", "passed", ""),
        ("return numbers(1)", "f(lambda x: x)", "unsupported", "of type function"),
        ("return 1", "oops oops", "unsupported", "problem's own program or test"),
    ],
)
def test_what_a_test_may_rely_on(run: Run, body: str, test: str, status: str, reason: str) -> None:
    """Arguments that the function changes, exceptions by type, the problem's helpers, all builtin values."""
    result = run(body, test=f"def check(f):\n  {test}\n")
    assert (result["status"], reason in result["reason"]) == (status, True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        0.5,
        float("inf"),
        "é\ud800",
        b"x",
        bytearray(b"x"),
        1j,
        (1, [2]),
        {1: {2}},
        frozenset({(1,)}),
    ],
)
def test_a_value_arrives_as_it_was(value: object) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert again == value and type(again) is type(value)


def test_the_environment_and_the_order_of_sets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    result = run("import os\nraise ValueError(sorted(os.environ))")
    assert "HOME" in result["reason"] and "SECRET_KEY" not in result["reason"]
    body = "raise ValueError(''.join({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert run(body)["reason"] == run(body)["reason"]


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="seconds=0 must be between 0 and 3600"):
        Limits(seconds=0)
    with pytest.raises(ValueError, match="must be at least 64 MiB"):
        Limits(memory=1)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("no bwrap", "bwrap"),
        ("bwrap fails", "No permissions"),
        ("home in prefix", "holds the home folder"),
    ],
)
def test_a_probe_gives_the_reason(
    cause: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_sandbox_problem.cache_clear()
    if cause == "bwrap fails":
        (tmp_path / "bwrap").write_text(
            "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
        )
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # without setpriv and unshare
    monkeypatch.setattr(sandbox, "SEARCH_PATH", str(tmp_path))
    if cause == "home in prefix":
        monkeypatch.setenv("HOME", str(Path(sys.base_prefix).resolve() / "home"))
    problem = find_sandbox_problem() or ""
    find_sandbox_problem.cache_clear()
    assert message in problem and ("--unsafe" in problem or cause == "home in prefix")


SCRIPT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("sandbox", sys.argv[1])
sandbox = sys.modules["sandbox"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)
if problem := sandbox.find_sandbox_problem():
    sys.exit(problem)
test, limits = "def check(attack): raise ValueError(attack())", sandbox.Limits(seconds=10, memory=256 * 2**20)
for name, program in json.load(sys.stdin).items():
    print(json.dumps([name, sandbox.run_program(program, "attack = None", test, "attack", limits)["reason"]]))
"""


def run_attacks(folder: Path, user: int, python: str) -> dict[str, str]:
    """The reports of all attacks when `user` starts the sandbox."""
    for path in (
        folder,
        *folder.parents,
    ):  # pytest's folders of root: let the other user pass through
        if path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o011)
    secret, copy, name = folder / "secret", folder / "copy.py", f"adlm-attack-{user}-{os.getpid()}"
    secret.write_text("hidden word", "utf-8")
    secret.chmod(0o600)
    shutil.copy(sandbox.__file__, copy)
    other: dict[str, Any] = {}
    if user != os.geteuid():
        os.chown(secret, user, user)
        other = {"user": user, "group": user, "extra_groups": []}
    source = Path(attacks.__file__).read_text("utf-8")
    with (
        subprocess.Popen(["sleep", "600"], **other) as bystander,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
    ):
        local.bind("\0" + name)
        local.listen()
        place = {
            "secret": str(secret),
            "pid": bystander.pid,
            "port": server.getsockname()[1],
            "name": name,
        }
        calls = {
            each.__name__: f"def attack(): return {each.__name__}({place!r})"
            for each in attacks.ATTACKS
        }
        programs = json.dumps({key: f"{source}\n{call}" for key, call in calls.items()}).encode()
        home = {"HOME": str(folder), "PATH": os.defpath}
        command = [python, "-c", SCRIPT, str(copy)]
        done = subprocess.run(
            command, input=programs, capture_output=True, env=home, cwd="/", timeout=300, **other
        )
        assert bystander.poll() is None
        bystander.kill()
    assert done.returncode == 0, done.stderr.decode()
    assert not list(Path("/tmp").glob(f"{name}*")) and secret.read_text("utf-8") == "hidden word"
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    require_sandbox()
    folder, is_root = tmp_path_factory.mktemp("attacks"), os.geteuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("only root can start a sandbox as root")
    if request.param == "root" or not is_root:
        return run_attacks(folder, os.geteuid(), sys.executable)
    command = [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"]
    if not Path(SYSTEM_PYTHON).exists() or subprocess.check_output(command).strip() != b"True":
        pytest.skip(
            f"{SYSTEM_PYTHON} is not Python 3.11 or later: no interpreter that another user may run"
        )
    return run_attacks(folder, ORDINARY_USER, SYSTEM_PYTHON)


@pytest.mark.parametrize("attack", [each.__name__ for each in attacks.ATTACKS])
def test_an_attack_reaches_nothing(reports: dict[str, str], attack: str) -> None:
    reached = reports[attack].removeprefix("test: ValueError: ")
    assert int(reached) <= attacks.MAX_ALLOWED.get(attack, 0), reached


def test_without_a_sandbox_an_attack_works(tmp_path: Path) -> None:
    """The attacks are sound: `unsafe` protects nothing."""
    secret = tmp_path / "secret"
    secret.write_text("hidden", "utf-8")
    place = {"secret": str(secret), "pid": os.getpid()}
    program = (
        f"{Path(attacks.__file__).read_text('utf-8')}\ndef attack(): return read_file({place!r})"
    )
    test = "def check(attack): raise ValueError(attack())"
    assert (
        run_program(program, "attack = None", test, "attack", SHORT, unsafe=True)["reason"]
        == "test: ValueError: 3"
    )


@pytest.mark.parametrize(
    "body", ["while True: pass", "import os\nos.closerange(0, 64)\nwhile True: pass", "return 3"]
)
def test_no_process_is_left(run: Run, body: str) -> None:
    run(body, Limits(seconds=0.4))
    end = time.monotonic() + 2
    while (
        left := find_processes("sandboxed interpreters run its source")
    ) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []


def find_processes(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found += [path.parent.name] if word in path.read_text("utf-8", "replace") else []
    return found
