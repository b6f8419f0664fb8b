"""A Python that has imported torch: programs start as forks of it, in milliseconds instead of seconds.

`python()` is a command to use in the place of `sys.executable`. Only packages of others are imported before: a program
imports putget and the tests' modules itself, with its own environment. Processes that a program starts by
`sys.executable`, among them torchrun's and multiprocessing's, are forks, too.

The command waits for the program, which is another process. If the command has process id N, the file N.pid beside it
has the program's id, for signals that a command cannot pass on, such as SIGSTOP. If a program leads a session, its
processes end with it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# torch.testing.assert_close imports the last one, which takes as long as torch itself.
_PRELOAD = "torch.distributed.run,torch.distributed.tensor"
_STUB = Path(__file__).with_name("warm_python.py")
_MOST_FILES = 250  # that one message may carry
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_servers: dict[tuple[str, str], tuple[subprocess.Popen[bytes], str]] = {}


def python(executable: str = sys.executable, preload: str = _PRELOAD, **environment: str) -> str:
    """The command; the first call starts the process behind it, which ends with this one.

    Args:
        executable: the Python.
        preload: modules to import, with a comma between two.
        environment: more variables, for that import.
    """
    key = executable, preload
    if key not in _servers or _servers[key][0].poll() is not None:
        folder = Path(tempfile.mkdtemp(prefix="putget_warm_"))
        command = folder / "python"
        words = [executable, "-I", "-S", str(_STUB), str(folder / "socket")]
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        command.chmod(0o700)
        # A waiting thread of OpenMP would spin on the cores of other ranks; the library reads this as it is loaded.
        settings = {**os.environ, "OMP_WAIT_POLICY": "passive", **environment}
        heard, told = os.pipe()
        process = subprocess.Popen(
            [executable, __file__, str(folder), preload, str(told)],
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[told],
        )
        os.close(told)
        with open(heard) as pipe:
            assert pipe.read() == "ready", f"{executable} could not import {preload}"
        _servers[key] = process, str(command)
    return _servers[key][1]


def close() -> None:
    """Ends the processes."""
    while _servers:
        process, command = _servers.popitem()[1]
        process.terminate()
        process.wait(30)
        shutil.rmtree(Path(command).parent)


@dataclass
class _Program:
    """A program that a caller asked for."""

    words: list[str]
    cwd: str
    environment: dict[str, str]
    leads: bool
    """Whether its caller leads a session."""
    files: list[int]
    received: list[int]
    """Descriptors here: the caller's network namespace, then one for each of `files`."""


def _read(caller: socket.socket) -> _Program:
    """Takes the words and files of a caller.

    Raises:
        OSError: It has ended before they were complete. Its files are closed then.
    """
    head, rights, _, _ = caller.recvmsg(8, socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize))
    received = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data)
    size, text = int.from_bytes(head, "little"), b""
    try:
        while len(text) < size or not head:
            part = caller.recv(size - len(text))
            if not part:
                raise ConnectionError("the caller has ended")
            text += part
    except OSError:
        for file in received:
            os.close(file)
        raise
    return _Program(**json.loads(text), received=list(received))


def _serve(listener: socket.socket, folder: Path) -> _Program:
    """Forks a process for each program that is asked for. Returns in these processes only."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    running: dict[socket.socket, tuple[int, int, bool, Path]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                caller, _ = listener.accept()
                try:
                    program = _read(caller)
                except OSError:
                    caller.close()
                    continue
                if (pid := os.fork()) == 0:
                    # At once: these objects form a cycle. Freed later, they would close files of the program.
                    selector.close()
                    for each in (caller, *running):
                        each.close()
                    return program
                for file in program.received:
                    os.close(file)
                ended = os.pidfd_open(pid)
                caller_id, _, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                note = folder / f"{caller_id}.pid"
                note.write_text(str(pid))
                running[caller] = pid, ended, program.leads, note
                selector.register(caller, selectors.EVENT_READ, caller)
                selector.register(ended, selectors.EVENT_READ, caller)
                continue
            caller = key.data
            if caller not in running:
                continue
            pid, ended, leads, note = running[caller]
            if key.fileobj is caller:
                numbers = caller.recv(64)
                for number in numbers or [signal.SIGKILL]:
                    os.kill(pid, number)
                if not numbers:
                    selector.unregister(caller)
                continue
            if leads:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            selector.unregister(ended)
            os.close(ended)
            with contextlib.suppress(KeyError):
                selector.unregister(caller)
            with contextlib.suppress(OSError):
                caller.sendall(status.to_bytes(8, "little"))
            caller.close()
            note.unlink()
            del running[caller]


def _take_files(program: _Program) -> None:
    """Has the caller's files under their numbers here, and no others."""
    network, *received = program.received
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino and ctypes.CDLL(None).setns(
        network, _CLONE_NEWNET
    ):
        raise OSError("setns")
    above = max([*program.files, *program.received, 2]) + 1
    held = [os.dup2(file, above + at, False) for at, file in enumerate(received)]
    os.closerange(0, above)
    for file, number in zip(held, program.files, strict=True):
        os.dup2(file, number)
    os.closerange(above, above + len(held))
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115 - open until the end
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        whole_lines = stream is sys.stderr or stream.isatty()
        unbuffered = bool(program.environment.get("PYTHONUNBUFFERED"))
        stream.reconfigure(line_buffering=whole_lines, write_through=unbuffered)


def _become(program: _Program, command: str, own: list[str]) -> None:
    """Makes this process look as Python does when it starts. own: entries of the search path that PYTHONPATH made."""
    import multiprocessing.spawn

    import numpy
    import torch

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if program.leads:
        os.setsid()
    _take_files(program)
    os.chdir(program.cwd)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # where a spawned process looks for the main program
    os.environ.clear()
    os.environ.update(program.environment)
    # torchrun and multiprocessing start others by these.
    os.environ["PYTHON_EXEC"] = sys.executable = command
    multiprocessing.spawn.set_executable(command)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)))
    numpy.random.seed()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    first, *arguments = program.words
    if first in ("-c", "-m"):
        _, *arguments = arguments
        head = "" if first == "-c" else os.getcwd()
    else:
        head = str(Path(first).resolve().parent)
    theirs = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [head, *theirs, *own]
    sys.argv = [first, *arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")


def _run(words: list[str]) -> None:
    main: dict[str, Any] = sys.modules["__main__"].__dict__
    main["__builtins__"] = __builtins__
    if words[0] == "-m":
        sys.modules.pop(words[1], None)  # preloaded
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] != "-c":
        main["__file__"] = words[0]
    text = words[1] if words[0] == "-c" else Path(words[0]).read_text()
    exec(compile(text, "<string>" if words[0] == "-c" else words[0], "exec", dont_inherit=True), main)


def _end(code: int) -> None:
    """Ends the process as Python does, except that it takes no module apart: with torch that takes half a second."""
    with contextlib.suppress(SystemExit):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run_to_the_end(words: list[str]) -> None:
    code = 0
    try:
        _run(words)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        raise  # the interpreter ends by that signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code)


def _main(folder: Path, preload: str, told: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    del sys.path[0]  # the folder of this file
    import numpy  # noqa: F401
    import torch.multiprocessing  # noqa: F401

    for name in preload.split(","):
        importlib.import_module(name)
    theirs = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    own = [path for path in sys.path if os.path.abspath(path) not in theirs]
    gc.freeze()  # else a collection writes to every page that forks share
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        os.write(told, b"ready")
        os.close(told)
        program = _serve(listener, folder)
    _become(program, str(folder / "python"), own)
    _run_to_the_end(program.words)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
