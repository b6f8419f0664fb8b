"""Native networks: between ranks that are threads of this process, and one rank's end of a transfer engine."""

from __future__ import annotations

import ctypes

from putget import _abi
from putget.errors import BackendUnavailable


class NativeNetwork:
    """A network of the native library, which ends with the last object on it.

    Attributes:
        handle: For native calls.
    """

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), ctypes.c_void_p()
        if handle:
            _abi.library().putget_network_destroy(handle)


class LocalNetwork(NativeNetwork):
    """Between ranks of this process, by threads that copy what ranks write, in random order.

    Args:
        size: Ranks, 2 to 128.
        seed: Of the order in which writes arrive.
    """

    def __init__(self, size: int, seed: int = 1) -> None:
        super().__init__()
        _abi.call("putget_network_local", size, seed, ctypes.byref(self.handle))


class EngineNetwork(NativeNetwork):
    """One rank's end of a network between processes: a transfer engine of its own.

    Args:
        rank: This rank.
        size: Ranks of the group.
        provider: A network that the engine has for host memory.
        nics: Of this host, as the provider names them; none leave the choice to the engine.
        secret: The same on all ranks.

    Raises:
        BackendUnavailable: There is no engine, or one of another version, or no such network on this machine.
        PutgetError: The operating system refused.
    """

    def __init__(self, rank: int, size: int, provider: str, nics: tuple[str, ...], secret: bytes) -> None:
        super().__init__()
        names = (ctypes.c_char_p * len(nics))(*(nic.encode() for nic in nics))
        kept = ctypes.create_string_buffer(secret, len(secret))
        config = _abi.EngineConfig(
            library=engine_library().encode(),
            provider=provider.encode(),
            nics=names,
            num_nics=len(nics),
            rank=rank,
            ranks=size,
            secret=ctypes.addressof(kept),
            secret_bytes=len(secret),
        )
        _abi.call("putget_network_engine", ctypes.byref(config), ctypes.byref(self.handle))


def engine_library() -> str:
    """Where the transfer engine's C functions are.

    Raises:
        BackendUnavailable: The package putget_transfer is not installed, or cannot be loaded.
    """
    try:
        import putget_transfer

        return str(putget_transfer.library())
    except ImportError as error:
        raise BackendUnavailable(f"a network between processes needs the package putget_transfer: {error}") from error
