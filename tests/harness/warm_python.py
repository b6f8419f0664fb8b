"""The command behind tests.harness.warm: passes a program to the warm Python, and is that program for its caller.

warm_python.py SOCKET WORDS...: WORDS are arguments of Python. The program gets the arguments, environment, folder,
network namespace and open files of this process; its exit status and the signals sent to it are passed on. It has a
process id of its own. Options but for -u and -B, for instance -S, need a Python of their own.
"""

import array
import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
from types import FrameType

PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def open_files() -> list[int]:
    """The descriptors that a program would inherit."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)


def nothing(number: int, frame: FrameType | None) -> None:
    """The handler of a signal whose number is passed on."""


def main(path: str, words: list[str]) -> None:
    environment = dict(os.environ)
    # torchrun and multiprocessing pass these on.
    while words and words[0] in ("-u", "-B"):
        environment["PYTHONUNBUFFERED" if words.pop(0) == "-u" else "PYTHONDONTWRITEBYTECODE"] = "1"
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        os.execve(sys.executable, [sys.executable, *words], environment)
    files = open_files()
    warm = socket.socket(socket.AF_UNIX)
    warm.connect(path)
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    leads = os.getsid(0) == os.getpid()
    told = {"words": words, "cwd": os.getcwd(), "environment": environment, "leads": leads, "files": files}
    text = json.dumps(told).encode()
    rights = array.array("i", [network, *files])
    warm.sendmsg([len(text).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    # A handler alone would not run for a signal that comes just before this process waits: its number comes here.
    came, comes = socket.socketpair()
    comes.setblocking(False)
    signal.set_wakeup_fd(comes.fileno())
    for number in PASSED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, nothing)
    warm.sendall(text)
    for file in files:  # else the end of a pipe would wait for this process
        os.close(file)
    while warm not in select.select([warm, came], [], [])[0]:
        with contextlib.suppress(OSError):
            warm.sendall(came.recv(64))
    answer = warm.recv(8)
    if not answer:
        os._exit(255)
    status = int.from_bytes(answer, "little")
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL needs no default
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
