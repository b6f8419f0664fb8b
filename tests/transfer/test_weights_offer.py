"""Offers: what is read is what was made, few bytes for each memory, and nothing unsound is taken."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt
from putget_transfer.weights import _offer
from putget_transfer.weights._native import Place, descs_for
from putget_transfer.weights._offer import Delta, make_offer, pack_memory, read_offer, text

COUNT = 1000


@pytest.fixture(scope="module")
def descs() -> bytes:
    """Return descriptors of much memory, for one peer."""
    network = pt.SimNetwork(seed=3)
    engines = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(2)]
    handles = [handle for handle, _ in engines[0].reg_mrs([bytearray(64) for _ in range(COUNT)])]
    packed = descs_for(engines[0], handles, engines[1].main_address())
    for engine in engines:
        engine.close()
    return packed


def offer_of(descs: bytes) -> bytes:
    return make_offer("digest", 7, 2, b"address", 5, pack_memory([(at, 0) for at in range(COUNT)]), descs)


def test_what_is_read_is_what_was_made_and_short(descs: bytes) -> None:
    offer = offer_of(descs)
    found = read_offer(offer)
    assert (found["digest"], found["version"], found["rank"], found["imm"]) == ("digest", 7, 2, 5)
    assert (found["address"], found["descs"], found["inbox"]) == (b"address", descs, [])
    assert found["memory"] == pack_memory([(at, 0) for at in range(COUNT)])
    Place(2, 5, found["memory"], found["descs"])
    assert len(offer) < len(descs) / 2


def test_rows_and_descriptors_that_do_not_fit_are_refused(descs: bytes) -> None:
    one = pack_memory([(COUNT - 1, 0)])
    Place(0, 1, one, descs)
    for memory, known in ((pack_memory([(COUNT, 0)]), descs), (one[:-1], descs), (one, descs[:-1]), (one, b"x" * 9)):
        with pytest.raises(ValueError, match="offers"):
            Place(0, 1, memory, known)


def changed(offer: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(offer), **fields}).encode()


@pytest.mark.parametrize("field", ["memory", "descs"])
def test_an_unsound_offer_is_refused(field: str, descs: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = offer_of(descs)
    packed = base64.b64decode(json.loads(offer)[field])
    for wrong in (packed[:-1], b"", zlib.compress(b"some")[1:]):
        with pytest.raises(ValueError, match="bytes came that are no offer"):
            read_offer(changed(offer, **{field: base64.b64encode(wrong).decode()}))
    with pytest.raises(ValueError, match="bytes came that are no offer"):
        read_offer(b"[" * 200_000)
    for strange in ({field: 3}, {field: "*"}, {"rank": "2"}):
        with pytest.raises(ValueError, match="bytes came that are no offer"):
            read_offer(changed(offer, **strange))
    monkeypatch.setattr(_offer, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="too many"):
        read_offer(offer)


def test_an_unsound_inbox_is_refused() -> None:
    network = pt.SimNetwork(seed=3)
    with pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() as engine:
        _, desc = engine.reg_mr(bytearray(64))
        sound = [3, 9, text(desc.to_bytes()), [[0, 0, 32], [1, 32, 32]]]
        assert Delta({"inbox": sound, "imm": 5}).records == {0: (0, 32), 1: (32, 32)}
        for at, wrong in (
            (0, -1),
            (1, "9"),
            (1, 1 << 70),
            (2, "*"),
            (3, [[0, 0]]),
            (3, [[0, 0, float("inf")]]),
            (3, [[0, 33, 32]]),
        ):
            with pytest.raises(ValueError, match="without a sound inbox"):
                Delta({"inbox": [*sound[:at], wrong, *sound[at + 1 :]], "imm": 5})


@pytest.mark.parametrize("wrong", [7, None, {0: b""}, [b""]])
def test_what_is_no_bytes_is_no_offer(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"offers: {type(wrong).__name__} came"):
        read_offer(wrong)
