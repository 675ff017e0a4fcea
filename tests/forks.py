"""Scripts in processes of their own that start in a moment: forks of one process, which has imported torch and the
package. Their exit codes, output and end are those of any script. Torch has one thread in them, and no GPU, as CUDA
takes no fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SERVER = """
from forks import enter, serve
request = serve()
if request is not None:  # in a fork
    exec(enter(request))
"""


@functools.cache
def server():
    """The process, which is started by the first script."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path} | NO_GPU, start_new_session=True,
    )  # fmt: skip
    atexit.register(end, process)
    return process


def end(process):
    """Ends the server, and a script that still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def run(code, *, cwd=None, timeout=120):
    """Runs the text of a script, as `python -c` does."""
    process = server()
    with tempfile.TemporaryDirectory() as directory:
        paths = [os.path.join(directory, name) for name in ("out", "err")]
        request = {"code": code, "cwd": str(cwd or Path.cwd()), "paths": paths, "env": os.environ | NO_GPU}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout)[0]:
            server.cache_clear()
            end(process)
            raise subprocess.TimeoutExpired(code, timeout)
        status = process.stdout.readline()
        said = [Path(path).read_text() for path in paths]
    return subprocess.CompletedProcess(code, int(status), *said)


def serve():
    """In the server: forks for each request and says how that fork has ended. Returns the request in the fork."""
    import sharding.warmed  # noqa: F401

    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
    return None


def enter(request):
    """In the fork: takes what is asked for as its own, and returns the code to run."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, path in enumerate(request["paths"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = ["-c"]
    return compile(request["code"], "<script>", "exec")
