"""The command line; `adlm train` answers a stop signal with its exit code from the first import on."""

import os
import signal
import sys
from types import FrameType


def exit_before_training(number: int, frame: FrameType | None) -> None:
    """End the process while there is nothing to save; `adlm.training.guard` replaces this signal handler."""
    os.write(2, b"stopped; the same command starts or resumes the run\n")
    os._exit(os.EX_TEMPFAIL)  # 75; not an exception, which an import might catch


if sys.argv[1:2] == ["train"] and os.path.basename(sys.argv[0]) in ("adlm", "__main__.py"):
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, exit_before_training)
