"""The command line; commands that train answer a stop signal with its exit code from the first import on."""

import os
import signal
import sys
from types import FrameType

EX_TEMPFAIL = 75  # os.EX_TEMPFAIL, which Windows lacks


def exit_before_training(number: int, frame: FrameType | None) -> None:
    """End the process while there is nothing to save; `adlm.training.guard` replaces this signal handler."""
    os.write(2, b"stopped; the same command starts or resumes the run\n")
    os._exit(EX_TEMPFAIL)  # not an exception, which an import might catch


is_training = sys.argv[1:2] == ["train"] or sys.argv[1:3] == ["reason", "train"]
if is_training and os.path.basename(sys.argv[0]) in ("adlm", "__main__.py"):
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # Windows lacks SIGUSR1
            signal.signal(getattr(signal, name), exit_before_training)
