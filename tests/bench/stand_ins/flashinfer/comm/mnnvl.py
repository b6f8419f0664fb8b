from __future__ import annotations

from dataclasses import dataclass

from .comm_backend import TorchDistBackend


@dataclass
class MnnvlConfig:
    comm_backend: TorchDistBackend


class MnnvlMemory:
    _fabric_supported: bool | None = None
