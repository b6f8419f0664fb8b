"""A cache from an engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from putget_transfer._native import Engine, MrHandle
from putget_transfer.kv._native import Cache, Geometry
from putget_transfer.kv._regions import Region

_MEANING = "L: layers, B: pages, K: keys and values apart, H: heads, N: tokens of a page, C: bytes of a head's token"


@dataclass(frozen=True)
class Layer:
    """A layer's tensor, where it differs from the cache's other layers.

    Attributes:
        memory: The tensor.
        layout: The letters of its dimensions; None: the cache's.
        window: Only the last so many tokens have a place.
        state: One page a request, whatever its length.
        group: The list of a request's pages that it uses.
        num_heads: Heads of the whole model; None: the cache's.
        heads: First head that this rank holds, and the last one plus 1; None: the cache's.
        whole: Pages move as a whole: how tokens lie in one is the engine's secret.
        page_tokens: Tokens of a page; None: the cache's.
    """

    memory: Any
    layout: str | None = None
    window: int | None = None
    state: bool = False
    group: int = 0
    num_heads: int | None = None
    heads: tuple[int, int] | None = None
    whole: bool = False
    page_tokens: int | None = None


def _whole(tensor: Any) -> tuple[int, int, Any]:
    """Return address and bytes of all of a tensor's memory, and an object that can be registered and stands for it."""
    if hasattr(tensor, "untyped_storage"):
        flat = tensor.new_empty(0).set_(tensor.untyped_storage())
        return flat.data_ptr(), flat.numel() * flat.element_size(), flat
    base = tensor
    while hasattr(getattr(base, "base", None), "__array_interface__"):
        base = base.base
    return base.__array_interface__["data"][0], base.nbytes, base


def _view(tensor: Any) -> tuple[int, list[int], list[int], int]:
    """Return address, sizes, strides in bytes and bytes of an item."""
    if hasattr(tensor, "data_ptr"):
        item = tensor.element_size()
        return tensor.data_ptr(), list(tensor.shape), [stride * item for stride in tensor.stride()], item
    if not hasattr(tensor, "__array_interface__"):
        raise ValueError(f"layers: {type(tensor).__name__} came; tensors of torch or arrays of numpy are needed")
    return tensor.__array_interface__["data"][0], list(tensor.shape), list(tensor.strides), tensor.itemsize


class _Builder:
    """Collects regions and the memory that they lie in."""

    def __init__(self, num_heads: int, heads: tuple[int, int], page_tokens: int, *, packed: bool) -> None:
        self.num_heads, self.heads, self.page_tokens, self.packed = num_heads, heads, page_tokens, packed
        self.regions: list[Region] = []
        self.memory: dict[int, tuple[int, int, Any]] = {}
        self.layers = 0

    def place(self, tensor: Any, address: int) -> tuple[int, int]:
        """Return the number of a tensor's memory, and where in it an address lies."""
        start, length, whole = _whole(tensor)
        number, _, _ = self.memory.setdefault(start, (len(self.memory), length, whole))
        return number, address - start

    def add(self, name: str, layer: Layer, layout: str) -> None:
        """Add a layer's region; all of them, if the tensor has a dimension of layers."""
        letters = layer.layout or layout
        address, sizes, strides, item = _view(layer.memory)
        if "L" in letters and len(sizes) == len(letters) - 1:
            letters = letters.replace("L", "")
        if len(sizes) != len(letters) or len(set(letters)) != len(letters) or not set(letters) <= set("LBKHNC"):
            raise ValueError(f"layout: {letters!r} came for {name!r} with {len(sizes)} dimensions; {_MEANING}")
        if not {"B", "C"} <= set(letters) or letters[-1] != "C" or strides[-1] != item:
            raise ValueError(f"layout: {letters!r} came for {name!r}; its last dimension is C, without gaps")
        size, stride = dict(zip(letters, sizes, strict=True)), dict(zip(letters, strides, strict=True))
        memory, offset = self.place(layer.memory, address)
        for index in range(size.get("L", 1)):
            own = f"{name}.{index}" if "L" in size else name
            self.regions.append(
                self.region(own, layer, (memory, offset + index * stride.get("L", 0)), size, stride, item)
            )
            self.layers += 1

    def region(
        self,
        name: str,
        layer: Layer,
        place: tuple[int, int],
        size: Mapping[str, int],
        stride: Mapping[str, int],
        item: int,
    ) -> Region:
        """Return one layer's region."""
        heads = layer.heads or ((0, 1) if "H" not in size and layer.state else self.heads)
        num_heads = layer.num_heads or (heads[1] if "H" not in size and layer.state else self.num_heads)
        if size.get("H", 1) != heads[1] - heads[0]:
            raise ValueError(f"heads: {heads} came; {name!r} has {size.get('H', 1)}")
        page_tokens = 1 if layer.state else layer.page_tokens or self.page_tokens
        if size.get("N", 1) != page_tokens:
            raise ValueError(f"page_tokens: {page_tokens} came; {name!r} has {size.get('N', 1)}")
        content = size["C"] * item
        packed = self.packed and "K" not in size and not layer.state
        if packed and content % 2:
            raise ValueError(f"packed: {name!r} has {content} bytes for keys and values, an odd number")
        return Region(
            name=name,
            layer=self.layers,
            num_pages=size["B"],
            page_tokens=page_tokens,
            num_heads=num_heads,
            heads=heads,
            head_bytes=content // 2 if packed else content,
            page_stride=stride["B"],
            token_stride=stride.get("N", 0),
            head_stride=stride.get("H", 0),
            planes=2 if packed else size.get("K", 1),
            plane_stride=content // 2 if packed else stride.get("K", 0),
            offset=place[1],
            memory=place[0],
            group=layer.group,
            window=layer.window,
            state=layer.state,
            whole=layer.whole,
        )


class KvCache(Cache):
    """A rank's cache: an engine's tensors, registered, with the geometry that follows from them."""

    handles: list[MrHandle]

    def __new__(
        cls,
        engine: Engine,
        layers: Mapping[str, Any],
        *,
        layout: str,
        page_tokens: int,
        num_kv_heads: int,
        heads: tuple[int, int] | None = None,
        packed: bool = True,
        model: str = "",
        rank: int = 0,
        context_bytes: int = 0,
    ) -> KvCache:
        """Register tensors and describe them.

        Args:
            engine: The engine that moves them.
            layers: A tensor, or a `Layer`, for each layer's name, in the order in which layers are computed. A tensor
                with all layers (L in its layout) stands for layers "name.0", "name.1" and so on.
            layout: The letters of a tensor's dimensions: L layers, B pages, K keys and values apart, H heads, N tokens
                of a page, C the bytes of one head's token. vLLM's six orders are LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and
                BHLNC; a tensor of one layer may leave L out. Strides are the tensors' own, so views are fine.
            page_tokens: Tokens of a page.
            num_kv_heads: Heads of the whole model; 1 for a latent cache (MLA).
            heads: First head that this rank holds, and the last one plus 1; None: all. Ranks may hold copies.
            packed: Whether C has keys and values side by side. Not for a latent cache.
            model: What else both sides must have in common: model, dtype, version.
            rank: The rank inside its tensor-parallel group.
            context_bytes: Bytes that travel beside the pages.

        Raises:
            ValueError: A tensor does not fit its layout, heads or page size; the layer and both values are named.
        """
        if not layers:
            raise ValueError("layers: none came; at least 1 is needed")
        builder = _Builder(num_kv_heads, heads or (0, num_kv_heads), page_tokens, packed=packed)
        for name, layer in layers.items():
            builder.add(name, layer if isinstance(layer, Layer) else Layer(layer), layout)
        lengths = [length for _, length, _ in builder.memory.values()]
        geometry = Geometry(model, builder.regions, lengths, rank=rank, context_bytes=context_bytes)
        handles = [engine.reg_mr(whole)[0] for _, _, whole in builder.memory.values()]
        cache = super().__new__(cls, engine, geometry, handles)
        cache.handles = handles
        return cache
