"""Ranks in processes of their own, for the tests of KV caches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.project.checkout import ROOT

WAIT_S = 60.0


class Process:
    """A rank in a process of its own, driven by lines."""

    def __init__(self, module: str, network: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        command = [sys.executable, "-m", module, network]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self.ready = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def do(self, *words: object) -> str:
        self.say(*words)
        return self.answer()

    def signal(self, number: int) -> None:
        """Send a signal; one that is stopped stands still when this returns."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            # A thread that runs on another processor goes on for a moment. This ends once all threads have stopped.
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


class Prefill(Process):
    """A prefill rank."""

    def __init__(self, network: str) -> None:
        super().__init__("tests.transfer.kv_prefiller", network)
        self.source = bytes.fromhex(self.ready)


class Decoder(Process):
    """A decode rank."""

    def __init__(self, network: str) -> None:
        super().__init__("tests.transfer.kv_decoder", network)
