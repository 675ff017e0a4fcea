"""What `python [-u] script …` and `python [-u] -m module …` do, done by a fork (`forks.py`): for programs that start
Python, such as torchrun. It imports neither torch nor the package, so that it starts in a moment itself."""

from __future__ import annotations

import os
import signal
import sys

from forks import Fork, run_module


def main(*args):
    environment = dict(os.environ)
    if args[0] == "-u":
        environment["PYTHONUNBUFFERED"], args = "1", args[1:]
    if args[0] == "-m":
        code, args = run_module(args[1]), args[2:]
    else:
        folder = os.path.dirname(os.path.abspath(args[0]))
        code = f"import runpy, sys\nsys.path[0] = {folder!r}\nrunpy.run_path({args[0]!r}, run_name='__main__')"
        args = args[1:]
    fork = Fork(code, *args, fds=[0, 1, 2], env=environment)
    signal.signal(signal.SIGTERM, lambda number, _: fork.send_signal(number))
    status = fork.wait()
    if status < 0:  # by a signal: this one ends by it, too
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
