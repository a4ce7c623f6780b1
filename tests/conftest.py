"""One thread per test, and a list of passed tests, which `.ci/run` leaves out in its second half."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the models of the tests are small

WRITE, LEAVE_OUT = "ADLM_TESTS_PASSED", "ADLM_TESTS_DONE"  # files of test names, one a line


def pytest_configure(config: pytest.Config) -> None:
    if WRITE in os.environ and not hasattr(config, "workerinput"):
        Path(os.environ[WRITE]).write_text("", "utf-8")
        config.pluginmanager.register(Passed(Path(os.environ[WRITE])))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests on the list; pytest counts them as deselected."""
    if LEAVE_OUT in os.environ:
        done = set(Path(os.environ[LEAVE_OUT]).read_text("utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]


class Passed:
    """Writes the names of tests whose call and teardown passed."""

    def __init__(self, path: Path) -> None:
        self.path, self.called = path, set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self.called:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(report.nodeid + "\n")
