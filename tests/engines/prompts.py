"""What the engines are asked for: prompts, as many new tokens of each, and a port to ask at."""

from __future__ import annotations

import socket

PROMPTS = [[3, 17, 41, 5, 96, 2], [77], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [50, 51], [1, 2, 3]]
NEW_TOKENS = [8, 3, 6, 8, 1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
