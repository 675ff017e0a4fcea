"""Scripts in processes of their own that start in a moment: forks of a process that has imported torch, and the
package unless a script is to do that itself. All workers of a run share that process. Exit codes, output, end and the
variables of Python's environment are those of any script. There is no GPU, as CUDA takes no fork.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import io
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
import time
from multiprocessing import Pipe, current_process
from pathlib import Path

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
PLACE = "TIEREDEMB_TESTS_FORKS"  # the directory of the sockets where servers take requests
START_S = 300  # at most; on a busy machine imports take long
BLOCK = 1 << 16  # bytes read at once
ALIVE_S = 5  # so often the server looks whether the run has ended without a word
WARMED, TORCH = "sharding.warmed", "torch"  # what a fork has imported: torch has one thread after the first
SERVER = """
import sys
from forks import enter, serve
request, fds = serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))  # returns in forks alone
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
    """Says where servers will be, to this process and its children: the workers of a run. The first script starts
    them, and they end with this process."""
    ENVIRONMENT.update(os.environ if not ENVIRONMENT else {})
    if PLACE not in os.environ:
        place = Path(tempfile.mkdtemp(prefix="tieredemb-forks-"))
        os.environ[PLACE] = str(place)
        (place / "run").write_text(str(os.getpid()))
        atexit.register(end, place, os.getpid())


def end(place, run):
    """Ends the servers, and all scripts that still run. Not in forks of the process that has prepared them."""
    if os.getpid() == run:
        for pid in place.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)
        shutil.rmtree(place)


def connected(base):
    """A socket to the server that has imported `base`."""
    prepare()
    path, client = Path(os.environ[PLACE], base), socket.socket(socket.AF_UNIX)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):  # not started, or ended
            path.unlink(missing_ok=True)
            start_server(base, path)
            client.connect(str(path))
    return client


def start_server(base, path):
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, base, path, (path.parent / "run").read_text()], stdin=subprocess.DEVNULL,
        env=ENVIRONMENT | {"PYTHONPATH": paths} | NO_GPU, start_new_session=True,
    )  # fmt: skip
    path.with_suffix(".pid").write_text(str(process.pid))
    stop = time.monotonic() + START_S
    while not path.exists():
        assert process.poll() is None, f"the process that scripts are forks of has ended: {process.returncode}"
        assert time.monotonic() < stop, f"the process that scripts are forks of has not started within {START_S} s"
        time.sleep(0.01)


def serve(base, path, run):
    """Forks for each request; returns it, and the descriptors that came with it, in the fork. Ends where the process
    `run` is gone."""
    importlib.import_module(base)
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
    env = request["env"]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = ["-c", *request["args"], *map(str, fds[3:])]
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    at_once = bool(env.get("PYTHONUNBUFFERED"))
    out = open(1, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115 - until the script ends
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, write_through=at_once)
    return compile(request["code"], "<script>", "exec")


# --- scripts ----------------------------------------------------------------------------------------------------------


class Fork:
    """A process that runs `python -c code *args`, and ends as any. `fds`: its input, output and errors, and others,
    whose numbers are its last arguments · `base`: what it has imported."""

    def __init__(self, code, *args, fds, base=WARMED, cwd=None, env=None):
        request = {
            "code": textwrap.dedent(code), "args": [str(arg) for arg in args], "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env) | NO_GPU,
        }  # fmt: skip
        self._server = connected(base)
        socket.send_fds(self._server, [b"-"], fds)
        self._server.sendall(json.dumps(request).encode())
        self._server.shutdown(socket.SHUT_WR)
        self.pid, self.returncode = self._told(), None

    def _told(self):
        """The next number that the server says: a byte at a time, so that none after it is taken."""
        said = b""
        while not said.endswith(b"\n"):
            byte = self._server.recv(1)
            assert byte, "the process that waits for a script has ended"
            said += byte
        return int(said)

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
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its server has not reported it yet
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
        (theirs_in, ours_in), (self._out, theirs_out) = os.pipe(), os.pipe()
        self.stdin, self._stderr = os.fdopen(ours_in, "w"), tempfile.TemporaryFile()  # noqa: SIM115 - closed in the end
        self._read = b""
        super().__init__(code, *args, fds=[theirs_in, theirs_out, self._stderr.fileno()], **keywords)
        os.close(theirs_in)
        os.close(theirs_out)

    def _reads(self, stop):
        """Reads more of its output; whether there was any before its end."""
        if not select.select([self._out], [], [], max(0, stop - time.monotonic()))[0]:
            raise subprocess.TimeoutExpired(f"script {self.pid}", None)
        more = os.read(self._out, BLOCK)
        self._read += more
        return bool(more)

    def readline(self, timeout=60):
        stop = time.monotonic() + timeout
        while b"\n" not in self._read and self._reads(stop):
            pass
        line, end, self._read = self._read.partition(b"\n")
        return (line + end).decode()

    def communicate(self, timeout=120):
        """The rest of its output, and its errors, once it has ended."""
        self.stdin.close()
        stop = time.monotonic() + timeout
        while self._reads(stop):
            pass
        self.wait(timeout)
        self._stderr.seek(0)
        return self._read.decode(), self._stderr.read().decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.wait()
        os.close(self._out)
        for file in (self.stdin, self._stderr, self._server):
            file.close()


def run_module(name):
    """The text of a script that is `python -m name`."""
    return f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def run(code, *args, timeout=120, **keywords):
    """Runs the text of a script, as `subprocess.run` of `python -c` does."""
    with Script(code, *args, **keywords) as script:
        said = script.communicate(timeout)
        return subprocess.CompletedProcess(code, script.returncode, *said)


def torchrun(*args, timeout=120, **keywords):
    """Runs it on the CPU, in a fork, and the processes that it starts are forks."""
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory, "python")
        script = Path(__file__).with_name("forked_python.py")
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -s "{script}" "$@"\n')
        python.chmod(0o700)
        env = os.environ | {"PYTHON_EXEC": str(python), "OMP_NUM_THREADS": "1"}
        return run(run_module("torch.distributed.run"), "--standalone", *args, timeout=timeout, env=env, **keywords)


def call(function, *args):
    """A process that calls `function(*args, pipe)`, and the other end of the pipe."""
    ours, theirs = Pipe()
    with theirs, open(os.devnull) as nothing:
        fork = Fork(CALL, fds=[nothing.fileno(), 1, 2, theirs.fileno()])
    ours.send((bytes(current_process().authkey), sys.path))
    ours.send((function, args))
    return fork, ours
