"""`putget simulate domains`: the product's proxies and the paper's scheme in virtual time, against published times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from putget_bench import cli
from putget_bench.domains import AGENTS, NETWORKS, PUBLISHED, ROUTES, Round, simulate

# By network and ranks, us: the line of arXiv 2510.27656's Table 2 with putget's bytes.
PREDICTED = {
    ("cx7", 16): (52, 71),
    ("cx7", 32): (88, 141),
    ("cx7", 64): (129, 218),
    ("efa", 16): (74, 95),
    ("efa", 32): (113, 168),
    ("efa", 64): (155, 251),
}


@pytest.mark.parametrize(("network", "ep_size"), PREDICTED, ids=str)
def test_the_proxies_meet_the_predictions(network: str, ep_size: int) -> None:
    found = simulate(Round(ep_size), NETWORKS[network], AGENTS)
    predicted = PREDICTED[network, ep_size]
    assert (found.dispatch_us, found.combine_us) == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize(("network", "ep_size"), PUBLISHED, ids=str)
def test_the_papers_scheme_is_near_what_is_published(network: str, ep_size: int) -> None:
    found = simulate(Round(ep_size), NETWORKS[network], ROUTES)
    dispatch, combine = PUBLISHED[network, ep_size]
    assert found.combine_us == pytest.approx(combine, rel=0.1 if network == "cx7" else 0.15)
    if network == "cx7":
        assert found.dispatch_us == pytest.approx(dispatch, rel=0.1)
    else:
        assert 0.65 * dispatch < found.dispatch_us < 1.1 * dispatch


def test_writes_and_bytes_are_counted() -> None:
    """One write a reached domain, one return each; bytes at most 1% above rows times domains."""
    for ep_size in (16, 64, 128):
        found = simulate(Round(ep_size), NETWORKS["cx7"], AGENTS)
        domains = ep_size // 8 - 1
        assert (found.dispatch_writes, found.combine_writes) == (ep_size * domains,) * 2
        rows = found.combine_bytes / 14336
        assert rows == int(rows)
        assert rows * 7456 < found.dispatch_bytes <= 1.01 * rows * 7456


def test_quantised_sums_take_half_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "domains.json"
    words = ["simulate", "domains", "--network", "cx7", "--ep_size", "64", "--output_file", str(path)]
    found = []
    for dtype in ("bfloat16", "fp8_block"):
        assert cli.main([*words, "--combine_dtype", dtype]) == 0
        found.append(json.loads(path.read_text())["results"][0])
    plain, low = (one["putget"] for one in found)
    assert low["combine_bytes"] * 14336 == plain["combine_bytes"] * 7392
    assert low["dispatch_us"] == plain["dispatch_us"]
    assert low["combine_us"] == pytest.approx(128, rel=0.1)  # the line of BF16 rows, 219 us, with half of its bytes
    assert found[0]["paper"] == found[1]["paper"]


def test_chunks_and_flat_domains() -> None:
    shape = Round(8, domain_size=4)
    whole = simulate(shape, NETWORKS["cx7"], AGENTS)
    cut = simulate(shape, NETWORKS["cx7"], AGENTS, chunk_rows=16)
    assert whole.dispatch_writes == 8 < cut.dispatch_writes
    assert cut.dispatch_us >= whole.dispatch_us
    flat = simulate(Round(8, domain_size=1), NETWORKS["cx7"], AGENTS)
    assert flat.dispatch_writes == 8 * 7
    assert flat.dispatch_bytes > whole.dispatch_bytes


def test_private_rows_hide_the_routes() -> None:
    """Rows that wait for no route come first where latency is what a dispatch waits for."""
    waits = simulate(Round(16), NETWORKS["efa"], ROUTES, private_tokens=0)
    sends = simulate(Round(16), NETWORKS["efa"], ROUTES, private_tokens=32)
    assert sends.dispatch_us < 0.9 * waits.dispatch_us


def test_a_table_and_a_document_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "domains.json"
    words = ["simulate", "domains", "--ep_size", "16,24", "--network", "cx7", "--num_experts", "192"]
    assert cli.main([*words, "--output_file", str(path)]) == 0
    assert "KB a token" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["schema"] == "putget.domains/1"
    assert [one["round"]["ep_size"] for one in document["results"]] == [16, 24]
    for one in document["results"]:
        assert one["paper"]["published_us"] is None
        assert one["putget"]["dispatch_us"] == pytest.approx(one["putget"]["line_us"][0], rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ep_size", "x"), "--ep_size is 'x'"),
        (("--ep_size", "200"), "--ep_size is 200, allowed are 2 to 128"),
        (("--ep_size", "20"), "--ep_size is 20, expected a multiple of --domain_size 8"),
        (("--ep_size", "8"), "--domain_size is 8, allowed are 1 to 4"),
        (("--tokens", "0"), "--tokens is 0, allowed are numbers from 1 on"),
        (("--top_k", "33"), "--top_k is 33, allowed are 1 to 32"),
        (("--tokens", "8192", "--chunk_rows", "5"), "--chunk_rows is 5, allowed are 128 to 8192"),
    ],
)
def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert cli.main(["simulate", "domains", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_action_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate"])
    assert ended.value.code == 2
    assert "required: {domains}" in capsys.readouterr().err
