"""Native networks: between ranks that are threads of this process, and one rank's end of a transfer engine."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from putget import _abi, _fork
from putget.errors import BackendUnavailable


class NativeNetwork:
    """A network of the native library, which ends with the last object on it.

    Attributes:
        handle: For native calls.
        gpu: The only one whose memory it reaches; None: any that it can reach at all.
    """

    gpu: int | None = None

    def __init__(self, staging: str) -> None:
        self.handle = ctypes.c_void_p()
        self._process = _fork.here
        self._staging = staging

    def waits_on(self, device: torch.device) -> bool:
        """Whether rows of objects on this device wait in its memory.

        Raises:
            ValueError: They are to, and cannot.
        """
        if device.type != "cuda":
            if self._staging == "device":
                raise ValueError(f"network staging is 'device', but the object's device is {device}")
            if self.gpu is not None:
                raise ValueError(f"the network reaches cuda:{self.gpu} alone, but the object's device is {device}")
            return False
        if self._staging == "host" or (self._staging == "auto" and self.gpu is None):
            return False
        if self.gpu is not None and device.index != self.gpu:
            raise ValueError(
                f"device is {device}, but the network copies with cuda:{self.gpu}, the current device when the "
                "communicator was made: call torch.cuda.set_device before"
            )
        return True

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), ctypes.c_void_p()
        if handle and self._process.is_here:  # a forked child has none of its threads
            _abi.library().putget_network_destroy(handle)


class LocalNetwork(NativeNetwork):
    """Between ranks of this process, by threads that copy what ranks write, in random order.

    Args:
        size: Ranks, 2 to 128.
        seed: Of the order in which writes arrive.
        staging: As that of ``putget.Network``.
    """

    def __init__(self, size: int, seed: int = 1, staging: str = "auto") -> None:
        super().__init__(staging)
        _abi.call("putget_network_local", size, seed, ctypes.byref(self.handle))


class EngineNetwork(NativeNetwork):
    """One rank's end of a network between processes, on a transfer engine of its own or on the caller's.

    Args:
        rank: This rank.
        size: Ranks of the group.
        provider: A network that the engine has.
        nics: Of this host, as the provider names them; none leave the choice to the engine.
        secret: The same on all ranks.
        staging: As that of ``putget.Network``.
        engine: The caller's, a ``putget_transfer.Engine``. Provider, NICs and secret are its own then.

    Raises:
        ValueError: The engine is none, or closed.
        BackendUnavailable: There is no engine, or one of another version, or no such network on this machine.
        PutgetError: The operating system refused.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        provider: str,
        nics: tuple[str, ...],
        secret: bytes,
        staging: str = "auto",
        engine: Any = None,
    ) -> None:
        super().__init__(staging)
        self._engine = engine  # closes when Python drops it
        if provider == "nvlink" or staging == "device":
            if not torch.cuda.is_available():
                raise BackendUnavailable(
                    f"network provider {provider!r} needs a CUDA GPU for rows that wait there; torch finds none"
                )
            self.gpu = torch.cuda.current_device()
        if engine is not None:
            config = _abi.EngineConfig(
                library=engine_library().encode(), rank=rank, ranks=size, gpu=-1, engine=engine_handle(engine)
            )
            _abi.call("putget_network_engine", ctypes.byref(config), ctypes.byref(self.handle))
            return
        names = (ctypes.c_char_p * len(nics))(*(nic.encode() for nic in nics))
        kept = ctypes.create_string_buffer(secret, len(secret))
        config = _abi.EngineConfig(
            library=engine_library().encode(),
            provider=provider.encode(),
            nics=names,
            num_nics=len(nics),
            rank=rank,
            ranks=size,
            gpu=-1 if self.gpu is None else self.gpu,
            secret=ctypes.addressof(kept),
            secret_bytes=len(secret),
        )
        _abi.call("putget_network_engine", ctypes.byref(config), ctypes.byref(self.handle))


def engine_handle(engine: Any) -> int:
    """The ``pt_engine`` of a caller's transfer engine, valid as long as the engine's Python object.

    Raises:
        BackendUnavailable: The package putget_transfer is not installed, or cannot be loaded.
        ValueError: It is no engine, it is closed, or it belongs to the parent of this forked process.
    """
    engine_library()
    import putget_transfer

    if not isinstance(engine, putget_transfer.Engine):
        raise ValueError(f"engine is {engine!r}, expected None or an open putget_transfer.Engine")
    try:
        return engine.c_handle()
    except putget_transfer.EngineError as error:
        raise ValueError(f"engine is {engine!r}, expected an open one of this process: {error}") from error


def engine_library() -> str:
    """Where the transfer engine's C functions are.

    Raises:
        BackendUnavailable: The package putget_transfer is not installed, or cannot be loaded.
    """
    try:
        import putget_transfer

        return str(putget_transfer.library())
    except ImportError as error:
        raise BackendUnavailable(
            f"a network between processes needs the package putget_transfer: {error}; "
            "in a checkout of putget: pip install ./transfer"
        ) from error
