"""Scripts in processes of their own that start in a moment: forks of one process, which has imported torch and the
package, and which all workers of a run share. Their exit codes, output and end are those of any script. Torch has one
thread in them, and no GPU, as CUDA takes no fork.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from multiprocessing import Pipe, current_process
from pathlib import Path

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
PLACE = "TIEREDEMB_TESTS_FORKS"  # the directory of the socket where the server takes requests
START_S = 300  # at most; on a busy machine imports take long
ALIVE_S = 5  # so often the server looks whether the run has ended without a word
SERVER = """
import sys
from forks import enter, serve
request, fds = serve(sys.argv[1], int(sys.argv[2]))  # returns in forks alone
exec(enter(request, fds))
"""
CALL = """
import os, sys
from multiprocessing import current_process
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
current_process().authkey, sys.path[:] = pipe.recv()  # for tensors, and for the function's module
function, args = pipe.recv()
function(*args, pipe)
os._exit(0)
"""
ENVIRONMENT = {}  # of the server: before any test changes it


# --- the server -------------------------------------------------------------------------------------------------------


def prepare():
    """Says where the server will be, to this process and its children: the workers of a run. The first script starts
    it, and it ends with this process."""
    ENVIRONMENT.update(os.environ if not ENVIRONMENT else {})
    if PLACE not in os.environ:
        os.environ[PLACE] = tempfile.mkdtemp(prefix="tieredemb-forks-")
        atexit.register(end, Path(os.environ[PLACE]), os.getpid())


def end(place, run):
    """Ends the server, and all scripts that still run. Not in forks of the process that has prepared it."""
    if os.getpid() == run:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int((place / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(place)


def ensure_server():
    """The path of its socket."""
    prepare()
    place = Path(os.environ[PLACE])
    path = place / "socket"
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            start_server(place, path)
    return str(path)


def start_server(place, path):
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, path, str(os.getpid())], stdin=subprocess.DEVNULL,
        env=ENVIRONMENT | {"PYTHONPATH": paths} | NO_GPU, start_new_session=True,
    )  # fmt: skip
    (place / "pid").write_text(str(process.pid))
    stop = time.monotonic() + START_S
    while not path.exists():
        assert process.poll() is None, f"the process that scripts are forks of has ended: {process.returncode}"
        assert time.monotonic() < stop, f"the process that scripts are forks of has not started within {START_S} s"
        time.sleep(0.01)


def serve(path, run):
    """Forks for each request; returns it, and the descriptors that came with it, in the fork. Ends where the process
    `run` is gone."""
    import sharding.warmed  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(128)
    os.rename(path + ".new", path)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not select.select([listener], [], [], ALIVE_S)[0]:
            try:
                os.kill(run, 0)
            except ProcessLookupError:
                os.killpg(0, signal.SIGKILL)
            continue
        client = listener.accept()[0]
        _, fds, *_ = socket.recv_fds(client, 1, 8)
        if os.fork() == 0:
            listener.close()
            return watched(client, fds)
        for fd in (client.detach(), *fds):
            os.close(fd)


def watched(client, fds):
    """In a fork that forks once more, for the script, and tells its number, and how it has ended."""
    with client.makefile("rb") as sent:
        request = json.loads(sent.read())
    script = os.fork()
    if script == 0:
        client.close()
        return request, fds
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(OSError):  # who has asked is gone
        client.sendall(f"{script}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
        client.sendall(f"{code}\n".encode())
    os._exit(0)


def enter(request, fds):
    """In the script: takes what is asked for as its own, and returns the code to run."""
    for own, fd in enumerate(fds[:3]):
        os.dup2(fd, own)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = ["-c", *request["args"], *map(str, fds[3:])]
    return compile(request["code"], "<script>", "exec")


# --- scripts ----------------------------------------------------------------------------------------------------------


class Fork:
    """A process that runs `python -c code *args`, and ends as any. `fds`: its input, output and errors, and others,
    whose numbers are its last arguments."""

    def __init__(self, code, *args, fds, cwd=None, env=None):
        request = {
            "code": textwrap.dedent(code), "args": [str(arg) for arg in args], "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env) | NO_GPU,
        }  # fmt: skip
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(ensure_server())
        socket.send_fds(self._server, [b"-"], fds)
        self._server.sendall(json.dumps(request).encode())
        self._server.shutdown(socket.SHUT_WR)
        self.pid, self.returncode = self._told(), None

    def _told(self):
        """The next number that the server says: a byte at a time, so that none after it is taken."""
        return int(b"".join(iter(lambda: self._server.recv(1), b"\n")))

    def poll(self):
        """Its exit code, or None while it runs; −9 of one that was killed by signal 9."""
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.returncode = self._told()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None and not select.select([self._server], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"script {self.pid}", timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def join(self, timeout=None):
        """As that of `multiprocessing.Process`, which ranks on GPUs are."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)

    @property
    def exitcode(self):
        return self.poll()


class Script(Fork):
    """What `subprocess.Popen` is, with pipes for input and output. Killed where a `with` statement ends."""

    def __init__(self, code, *args, **keywords):
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in the end
        super().__init__(code, *args, fds=[theirs_in, theirs_out, self._stderr.fileno()], **keywords)
        os.close(theirs_in)
        os.close(theirs_out)

    def communicate(self, timeout=None):
        """The rest of its output, and its errors, once it has ended."""
        self.stdin.close()
        said = []
        reader = threading.Thread(target=lambda: said.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(f"script {self.pid}", timeout)
        self.wait(timeout)
        self._stderr.seek(0)
        return said[0], self._stderr.read().decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.wait()
        for file in (self.stdin, self.stdout, self._stderr, self._server):
            file.close()


def run(code, *args, timeout=120, **keywords):
    """Runs the text of a script, as `subprocess.run` of `python -c` does."""
    with Script(code, *args, **keywords) as script:
        said = script.communicate(timeout)
        return subprocess.CompletedProcess(code, script.returncode, *said)


def call(function, *args):
    """A process that calls `function(*args, pipe)`, and the other end of the pipe."""
    ours, theirs = Pipe()
    with theirs, open(os.devnull) as nothing:
        fork = Fork(CALL, fds=[nothing.fileno(), 1, 2, theirs.fileno()])
    ours.send((bytes(current_process().authkey), sys.path))
    ours.send((function, args))
    return fork, ours
