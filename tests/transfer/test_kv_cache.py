"""Caches from tensors: every order of dimensions, views, states, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt
from putget_transfer import kv

LAYERS, PAGES, HEADS, TOKENS, CONTENT = 3, 10, 4, 8, 16
SIZES = {"L": LAYERS, "B": PAGES, "H": HEADS, "N": TOKENS, "C": CONTENT}
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
WAIT_S = 60.0


@pytest.fixture
def engines() -> Iterator[tuple[pt.Engine, pt.Engine]]:
    network = pt.SimNetwork(3)
    with (
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() as one,
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() as other,
    ):
        yield one, other


def tensor(order: str, **sizes: int) -> np.ndarray:
    return np.zeros([{**SIZES, **sizes}[letter] for letter in order], dtype=np.uint16)


def canonical(array: np.ndarray, order: str) -> np.ndarray:
    """Return a view with the dimensions L, B, N, H, C."""
    return array.transpose([order.index(letter) for letter in "LBNHC"])


def move(source: kv.Cache, target: kv.Cache, pages: tuple[list[list[int]], list[list[int]]], tokens: int) -> bytes:
    """Move one request between two caches and return its context."""
    prefiller, decoder = kv.Prefiller(source), kv.Decoder(target, max_requests=4)
    receive = decoder.request(decoder.sources([prefiller.source()]), "r", pages[1], tokens=tokens, segment_tokens=7)
    prefiller.begin_step(1, [("r", tokens, pages[0])])
    prefiller.layer_done(1000)
    prefiller.finish("r", b"first token")
    receive.wait(WAIT_S)
    return receive.context


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_arrives_in_every_other(order: str, engines: tuple[pt.Engine, pt.Engine]) -> None:
    other = ORDERS[(ORDERS.index(order) + 2) % len(ORDERS)]
    random = np.random.default_rng(1)
    mine, theirs = tensor(order), tensor(other, B=22, N=3)
    mine[...] = random.integers(1, 60000, mine.shape)
    common = {"num_kv_heads": HEADS, "context_bytes": 16}
    source = kv.KvCache(engines[0], {"model": mine}, layout=order, page_tokens=TOKENS, **common)
    target = kv.KvCache(engines[1], {"model": theirs}, layout=other, page_tokens=3, **common)
    tokens = 20
    pages = [[7, 2, 9]], [random.permutation(22)[:7].tolist()]
    assert target.geometry.num_pages(0, tokens) == [7]
    assert move(source, target, pages, tokens) == b"first token".ljust(16, b"\0")
    for token in range(tokens):
        sent = canonical(mine, order)[:, pages[0][0][token // TOKENS], token % TOKENS]
        found = canonical(theirs, other)[:, pages[1][0][token // 3], token % 3]
        assert (sent == found).all(), token
    assert np.count_nonzero(theirs) == LAYERS * tokens * HEADS * CONTENT


def test_views_of_layers_and_keys_apart_are_the_same_cache(engines: tuple[pt.Engine, pt.Engine]) -> None:
    apart = np.zeros([2, PAGES, TOKENS, HEADS, CONTENT // 2], dtype=np.uint16)  # keys, then values
    whole = tensor("BLHNC")
    whole[...] = np.random.default_rng(2).integers(1, 60000, whole.shape)
    views = {"a": whole[:, 2]}
    source = kv.KvCache(engines[0], views, layout="BLHNC", page_tokens=TOKENS, num_kv_heads=HEADS, context_bytes=16)
    target = kv.KvCache(
        engines[1], {"a": apart}, layout="KBNHC", page_tokens=TOKENS, num_kv_heads=HEADS, context_bytes=16
    )
    move(source, target, ([[4, 1]], [[0, 8]]), 2 * TOKENS)
    for page, own in ((4, 0), (1, 8)):
        keys_values = whole[page, 2].transpose(1, 0, 2)
        assert (apart[0, own] == keys_values[..., : CONTENT // 2]).all()
        assert (apart[1, own] == keys_values[..., CONTENT // 2 :]).all()


def test_tensors_of_torch_states_and_windows(engines: tuple[pt.Engine, pt.Engine]) -> None:
    torch = pytest.importorskip("torch")

    def layers(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        return {
            "latent": torch.randn(PAGES, TOKENS, CONTENT),
            "window": kv.Layer(torch.randn(PAGES, TOKENS, CONTENT), window=5, group=1),
            "state": kv.Layer(torch.randn(PAGES, 100), layout="BC", state=True, group=2),
        }

    sent, found = layers(1), layers(2)
    untouched = found["window"].memory.clone()
    common = {"layout": "BNC", "page_tokens": TOKENS, "num_kv_heads": 1, "packed": False, "context_bytes": 16}
    source, target = kv.KvCache(engines[0], sent, **common), kv.KvCache(engines[1], found, **common)
    assert "window 5" in target.describe()
    assert "10 states" in target.describe()
    tokens = 3 * TOKENS
    assert target.geometry.num_pages(0, tokens) == [3, 1, 1]
    move(source, target, ([[1, 2, 3], [4, 5, 6], [7]], [[3, 0, 9], [8], [2]]), tokens)
    for own, page in ((1, 3), (2, 0), (3, 9)):
        assert torch.equal(sent["latent"][own], found["latent"][page])
    assert torch.equal(sent["window"].memory[6, -5:], found["window"].memory[8, -5:])
    assert torch.equal(untouched[8, :-5], found["window"].memory[8, :-5])
    assert torch.equal(sent["state"].memory[7], found["state"].memory[2])


def test_whole_pages_move_with_what_lies_behind_the_last_token(engines: tuple[pt.Engine, pt.Engine]) -> None:
    def layers(seed: int) -> dict[str, kv.Layer]:
        memory = np.random.default_rng(seed).integers(1, 60000, [2, PAGES, HEADS, TOKENS, CONTENT], dtype=np.uint16)
        small = memory[1].reshape(PAGES * 2, HEADS, TOKENS // 2, CONTENT)
        return {
            "full": kv.Layer(memory[0], whole=True),
            "window": kv.Layer(small, whole=True, window=6, group=1, page_tokens=TOKENS // 2),
        }

    sent, found = layers(1), layers(2)
    common = {"layout": "BHNC", "page_tokens": TOKENS, "num_kv_heads": HEADS, "context_bytes": 16}
    source, target = kv.KvCache(engines[0], sent, **common), kv.KvCache(engines[1], found, **common)
    untouched = found["window"].memory.copy()
    # 21 tokens are 3 pages of 8; the last 6 of them lie in 3 pages of 4.
    assert target.geometry.num_pages(0, 21) == [3, 3]
    move(source, target, ([[1, 2, 3], [4, 5, 6, 7, 8, 9]], [[3, 0, 9], [8, 2, 5]]), 21)
    assert (sent["full"].memory[[1, 2, 3]] == found["full"].memory[[3, 0, 9]]).all()
    assert (sent["window"].memory[[7, 8, 9]] == found["window"].memory[[8, 2, 5]]).all()
    others = [page for page in range(2 * PAGES) if page not in (8, 2, 5)]
    assert (untouched[others] == found["window"].memory[others]).all()


def test_what_does_not_fit_is_named(engines: tuple[pt.Engine, pt.Engine]) -> None:
    good = {"layout": "LBHNC", "page_tokens": TOKENS, "num_kv_heads": HEADS}

    def refused(layers: dict[str, object], **changed: object) -> str:
        with pytest.raises(ValueError, match=r": .* came") as raised:
            kv.KvCache(engines[0], layers, **{**good, **changed})
        return str(raised.value)

    whole = {"model": tensor("LBHNC")}
    assert "'LBHN' came for 'model' with 5 dimensions" in refused(whole, layout="LBHN")
    assert "its last dimension is C" in refused(whole, layout="LBHCN")
    assert "page_tokens: 7 came; 'model.0' has 8" in refused(whole, page_tokens=7)
    assert "heads: (0, 2) came; 'model.0' has 4" in refused(whole, heads=(0, 2))
    assert "heads 2 to 6 of 4" in refused(whole, heads=(2, 6))
    assert "tensors of torch or arrays of numpy" in refused({"a": b"bytes"})
    assert "none came" in refused({})
    assert "window of 0 tokens" in refused({"a": kv.Layer(tensor("LBHNC"), window=0)})
    with pytest.raises(ValueError, match='layout: "XYZ" came; LBHNC'):
        kv.strides("XYZ", (1, 1, 1, 1, 1))
    assert kv.strides("BHLNC", (3, 10, 4, 8, 32)) == [8 * 32, 4 * 3 * 8 * 32, 3 * 8 * 32, 32]
