"""KV caches in one process: awaiting, cancelling, polling, plans, the command line and the stub."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.project.checkout import ROOT

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt
from putget_transfer import kv
from putget_transfer.kv import _native

WAIT_S = 60.0
STUB = ROOT / "transfer/python/putget_transfer/kv/_native.pyi"


class Pair:
    """A prefill and a decode rank with one layer each."""

    def __init__(self, network: pt.SimNetwork) -> None:
        def cache(size: int) -> tuple[pt.Engine, np.ndarray, kv.KvCache]:
            engine = pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build()
            pages = np.zeros([16, size, 32], dtype=np.uint8)
            common = {"layout": "BNC", "page_tokens": size, "num_kv_heads": 1, "packed": False, "context_bytes": 8}
            return engine, pages, kv.KvCache(engine, {"layer": pages}, **common)

        self.prefill_engine, self.sent, source = cache(4)
        self.decode_engine, self.found, target = cache(8)
        self.prefiller, self.decoder = kv.Prefiller(source, lease_s=3600), kv.Decoder(target, max_requests=2)
        self.target = target
        self.sources = self.decoder.sources([self.prefiller.source()])
        self.step = 0

    def prefill(self, name: str, pages: list[int], tokens: int) -> None:
        self.step += 1
        self.prefiller.begin_step(self.step, [(name, tokens, [np.array(pages)])])
        self.sent[pages] = self.step
        self.prefiller.layer_done(0)
        self.prefiller.finish(name, b"first")


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(pt.SimNetwork(5))
    yield pair
    pair.prefill_engine.close()
    pair.decode_engine.close()


def test_a_request_is_awaited(pair: Pair) -> None:
    async def decode() -> None:
        receive = pair.decoder.request(pair.sources, "r", [[3, 1]], tokens=16)
        threading.Thread(target=pair.prefill, args=("r", [5, 6, 7, 0], 16)).start()
        await asyncio.wait_for(receive, WAIT_S)
        assert (receive.state, receive.context) == ("arrived", b"first\0\0\0")

    asyncio.run(decode())
    assert (pair.found[[3, 1]] == 1).all()
    assert (pair.found[[0, 2]] == 0).all()
    arrived, failed, released = pair.decoder.poll()
    assert (len(arrived), failed, released) == (1, [], [])
    while not pair.prefiller.drain():
        pass
    assert pair.prefiller.poll() == [("r", "sent")]


def test_a_cancelled_request_raises_when_its_pages_are_free(pair: Pair) -> None:
    receive = pair.decoder.request(pair.sources, "r", [[3, 1]], tokens=16)
    with pytest.raises(TimeoutError):
        receive.result()
    with pytest.raises(ValueError, match="page 3 of list 0 came; another request has it"):
        pair.decoder.request(pair.sources, "s", [[4, 3]], tokens=16)
    told = threading.Event()
    receive.add_done_callback(lambda _none: told.set())
    receive.cancel()
    with pytest.raises(kv.ReceiveFailed, match="the decoder has cancelled it"):
        receive.wait(WAIT_S)
    assert told.wait(WAIT_S)
    assert (receive.state, receive.reason) == ("released", "the decoder has cancelled it")
    assert pair.decoder.quarantined == 0
    assert pair.decoder.poll() == ([], [(receive.number, receive.reason)], [receive.number])
    again = pair.decoder.request(pair.sources, "s", [[4, 3]], tokens=16)
    pair.prefill("s", [1, 2, 3, 4], 16)
    again.wait(WAIT_S)
    assert 'requests_total{end="arrived"} 1' in pair.decoder.metrics_text()
    await_cancelled(pair)


def await_cancelled(pair: Pair) -> None:
    """Wait until the prefiller has counted a cancelled request, which its cancel may overtake."""
    end = time.monotonic() + WAIT_S
    while 'requests_total{end="cancelled"} 1' not in pair.prefiller.metrics_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_decoder_that_is_dropped_gives_its_requests_up(pair: Pair) -> None:
    own = pair.decoder.request(pair.sources, "r", [[1, 2]], tokens=16)
    assert own.state in ("asked", "accepted")
    target = kv.Decoder(pair.target, max_requests=2)
    del own, pair.decoder
    await_cancelled(pair)
    again = target.request(target.sources([pair.prefiller.source()]), "s", [[1, 2]], tokens=16)
    pair.prefill("s", [1, 2, 3, 4], 16)
    again.wait(WAIT_S)


def test_the_stages_of_a_request_are_timed(pair: Pair) -> None:
    receive = pair.decoder.request(pair.sources, "r", [[3, 1]], tokens=16)
    while receive.state == "asked":
        time.sleep(0.001)
    pair.prefill("r", [5, 6, 7, 0], 16)
    receive.wait(WAIT_S)
    end = time.monotonic() + WAIT_S
    while not pair.prefiller.poll():
        assert time.monotonic() < end
    for side, stages in (("decoder", ("accepted", "arrived")), ("prefiller", ("first_page", "last_page", "context"))):
        text = getattr(pair, side).metrics_text()
        for stage in stages:
            assert f'putget_kv_{side}_stage_seconds_count{{stage="{stage}"}} 1\n' in text
            assert f'putget_kv_{side}_stage_seconds_bucket{{stage="{stage}",le="+Inf"}} 1\n' in text


def test_a_failed_prefill_says_why(pair: Pair) -> None:
    receive = pair.decoder.request(pair.sources, "r", [[3, 1]], tokens=16)
    pair.prefiller.begin_step(1, [("r", 8, [[1, 2]])])
    pair.prefiller.fail("r", "the batch was too large")
    with pytest.raises(kv.ReceiveFailed, match="the batch was too large"):
        receive.wait(WAIT_S)


def test_a_preempted_prefill_goes_on_in_other_pages(pair: Pair) -> None:
    receive = pair.decoder.request(pair.sources, "r", [[3, 1]], tokens=16, segment_tokens=8)
    pair.prefiller.begin_step(1, [("r", 8, [[1, 2]])])
    pair.prefiller.layer_done(0)
    while not pair.prefiller.rewind("r"):
        pass
    pair.step = 1
    pair.prefill("r", [5, 6, 7, 0], 16)
    receive.wait(WAIT_S)
    while not pair.prefiller.drain():
        pass
    with pytest.raises(ValueError, match="it is over"):
        pair.prefiller.fail("r", "too late")
    assert pair.prefiller.rewind("nobody's")


def test_mistakes_are_value_errors(pair: Pair) -> None:
    for change in ({"tokens": -1}, {"tokens": 0}, {"segment_tokens": 0}, {"first_token": 17}, {"num_targets": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            pair.decoder.request(pair.sources, "r", [[3, 1]], **{"tokens": 16, **change})
    with pytest.raises(ValueError, match="deadline_s"):
        pair.decoder.request(pair.sources, "r", [[3, 1]], tokens=16, deadline_s=-1)
    with pytest.raises(ValueError, match="pages"):
        pair.decoder.request(pair.sources, "r", [[3, 99]], tokens=16)
    with pytest.raises(ValueError, match="data"):
        pair.decoder.sources([b"not a source"])
    with pytest.raises(ValueError, match="step"):
        pair.prefiller.begin_step(0, [])
    with pytest.raises(ValueError, match="lease_s"):
        kv.Prefiller(other_cache(pair), lease_s=-1)
    assert pair.decoder.poll() == ([], [], [])
    requests = [pair.decoder.request(pair.sources, name, [[page]], tokens=8) for name, page in (("a", 0), ("b", 1))]
    with pytest.raises(pt.EngineBusy):
        pair.decoder.request(pair.sources, "c", [[2]], tokens=8)
    for receive in requests:
        receive.cancel()


def other_cache(pair: Pair) -> kv.Cache:
    return kv.KvCache(pair.decode_engine, {"l": np.zeros([2, 4, 8])}, layout="BNC", page_tokens=4, num_kv_heads=1)


@pytest.mark.parametrize(("name", "number"), [("layer", 65_535), ("group", 16_384), ("group", 2**32 - 1)])
def test_numbers_of_layers_and_groups_that_cannot_be_told_are_refused(name: str, number: int) -> None:
    region = kv.Region(
        name="l", layer=0, num_pages=8, page_tokens=4, num_heads=1, heads=(0, 1), head_bytes=16, page_stride=64,
        token_stride=16, head_stride=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{name} {number}"):
        kv.Geometry("m", [dataclasses.replace(region, **{name: number})], [512])
    last = dataclasses.replace(region, layer=65_534, group=16_383)
    assert kv.Geometry("m", [last], [512]).num_pages(0, 8) == [0] * 16_383 + [2]


def test_both_sides_plan_the_same() -> None:
    def geometry(rank: int) -> kv.Geometry:
        region = kv.Region(
            name="l", layer=0, num_pages=8, page_tokens=4, num_heads=1, heads=(0, 1), head_bytes=16, page_stride=64,
            token_stride=16, head_stride=16,
        )  # fmt: skip
        return kv.Geometry("m", [region], [512], rank=rank, context_bytes=4)

    sources, target = [geometry(0), geometry(1)], geometry(0)
    again = [kv.Geometry.from_bytes(source.to_bytes()) for source in sources]
    assert again == sources
    assert again[0].digest != again[1].digest
    one = kv.plan(sources, target, request_id="r", tokens=20, segment_tokens=8)
    other = kv.plan(again, target, request_id="r", tokens=20, segment_tokens=8)
    assert one.show() == other.show()
    assert (one.count, one.num_bytes, one.num_writes) == (3 + 1, 20 * 16, 5)
    assert sum(one.of(source).count for source in (0, 1)) == one.count
    with pytest.raises(ValueError, match="source: 2 came"):
        one.of(2)
    used = {kv.plan(sources, target, request_id=str(at), tokens=4).of(0).count for at in range(50)}
    assert used == {0, 2}


def test_a_draw_names_the_plan_that_both_sides_follow() -> None:
    network = pt.SimNetwork(3)

    def rank() -> tuple[pt.Engine, kv.KvCache]:
        engine = pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build()
        shape = {"layout": "BNC", "page_tokens": 4, "num_kv_heads": 1, "packed": False}
        return engine, kv.KvCache(engine, {"layer": np.zeros([16, 4, 32], dtype=np.uint8)}, **shape)

    # Three ranks have copies of the only head.
    ranks = [rank() for _ in range(4)]
    caches = [cache for _, cache in ranks]
    prefillers, decoder = [kv.Prefiller(cache, lease_s=3600) for cache in caches[:3]], kv.Decoder(caches[3])
    sources, sent = decoder.sources([prefiller.source() for prefiller in prefillers]), [0, 0, 0]
    draws = []
    for step in range(1, 7):
        name, tokens = f"r{step}", 4 + step
        receive = decoder.request(sources, name, [[2, 0, 3][: -(-tokens // 4)]], tokens=tokens)
        geometries = [cache.geometry for cache in caches]
        plan = kv.plan(geometries[:3], geometries[3], request_id=name, tokens=tokens, draw=receive.draw)
        for prefiller in prefillers:
            prefiller.begin_step(step, [(name, tokens, [[1, 5, 4]])])
            prefiller.layer_done(0)
            prefiller.finish(name)
        receive.wait(WAIT_S)
        sent = [before + plan.of(at).num_bytes for at, before in enumerate(sent)]
        for prefiller, num_bytes in zip(prefillers, sent, strict=True):
            assert f"putget_kv_prefiller_bytes_total {num_bytes}\n" in prefiller.metrics_text()
        draws.append(receive.draw)
    # The loads even out: each rank has sent two of six requests.
    assert sorted(draws) == [0, 0, 1, 1, 2, 2]
    for engine, _ in ranks:
        engine.close()


def test_the_command_prints_a_plan() -> None:
    command = [sys.executable, "-m", "putget_transfer.kv", "plan"]
    shown = subprocess.run([*command, "--context_bytes", "64"], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.startswith("count 245, 287834112 bytes in 3904 writes\n")
    wrong = subprocess.run([*command, "--first_token", "9999"], capture_output=True, text=True, check=False, timeout=60)
    assert wrong.returncode == 2
    assert "first_token: 9999 came; 0 to 4096 are allowed" in wrong.stderr


def test_the_stub_names_what_there_is() -> None:
    tree = ast.parse(STUB.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {name: item for name, item in vars(_native).items() if not name.startswith("_")}
    assert found.keys() == classes.keys() | functions.keys()
    for name, node in classes.items():
        item = found[name]
        if issubclass(item, Exception):
            continue
        methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
        assert {own for own in vars(item) if not own.startswith("_")} == {
            own for own in methods if not own.startswith("_")
        }, name
        for own, method in methods.items():
            if not own.startswith("_") and callable(getattr(item, own)):
                names = [argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)]
                names = [argument for argument in names if argument != "self"]
                given = [
                    argument for argument in inspect.signature(getattr(item, own)).parameters if argument != "self"
                ]
                assert given == names, (name, own)


def test_an_engine_closes_while_a_callback_asks_its_request_how_it_ended() -> None:
    states: list[str] = []
    for _ in range(5):
        pair = Pair(pt.SimNetwork(5))
        receive = pair.decoder.request(pair.sources, "r", [[3, 1]], tokens=16)
        receive.add_done_callback(lambda _none, receive=receive: states.append(receive.state))
        closing = threading.Thread(target=pair.decode_engine.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        pair.prefill_engine.close()
    assert states == ["released"] * 5
