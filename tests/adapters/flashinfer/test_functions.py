"""FlashInfer's functions moe_a2a_*: ranks of a group, ranks of one process, and what is refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from putget.adapters.flashinfer import functions
from tests.adapters.conftest import Place
from tests.adapters.layer import Layer, same_bits
from tests.harness import Rank, run_ranks

RAGGED = Layer(num_tokens=(3, 0, 8, 1))
UNEVEN = Layer(num_tokens=(3, 2, 5, 1), num_experts=10, owners=(0, 0, 0, 1, 1, 1, 2, 2, 3, 3))


def workspace_of(layer: Layer, device: torch.device | str) -> torch.Tensor:
    """Memory with room for one layer's rows."""
    size = functions.moe_a2a_get_workspace_size_per_rank(
        layer.ep_size, layer.max_tokens_per_rank, 2 * layer.hidden_size + 8 * layer.top_k, 2 * layer.hidden_size
    )
    return torch.full((layer.ep_size, size), 7, dtype=torch.uint8, device=device)


def one_round(
    layer: Layer, workspace: torch.Tensor, metainfo: torch.Tensor, rank: int, *, in_workspace: bool, **masks: Any
) -> torch.Tensor:
    """Dispatch, ids made invalid, experts, combine."""
    ids, weights = (tensor.to(workspace.device) for tensor in layer.routes(rank))
    (x,) = (tensor.to(workspace.device) for tensor in layer.rows(rank))
    most, size = layer.max_tokens_per_rank, layer.ep_size
    sizes = {"ep_rank": rank, "ep_size": size, "top_k": layer.top_k}
    got, offset, stats = functions.moe_a2a_dispatch(
        ids, [x, ids, weights], workspace, metainfo, most, num_experts=layer.num_experts, **sizes, **masks
    )
    assert stats is None
    functions.moe_a2a_sanitize_expert_ids(got[1], workspace, metainfo, rank, -1)
    rows, seen_ids, seen_weights = (tensor.view(-1, tensor.shape[-1]) for tensor in got)
    output = layer.experts((rows,), seen_ids, seen_weights, rank).view(size, most, -1)
    if in_workspace:
        place = functions.moe_a2a_wrap_payload_tensor_in_workspace(
            workspace[rank], [size, most], offset, offset + output.nbytes, output.dtype
        )
        place.copy_(output)
        output = place
    return functions.moe_a2a_combine(
        output, len(ids), workspace, metainfo, most, **sizes, combine_payload_offset=offset,
        payload_in_workspace=in_workspace, **masks,
    ).cpu()  # fmt: skip


def of_a_group(rank: Rank, layer: Layer) -> list[torch.Tensor]:
    """A body: every rank has a workspace of its own, and a communicator."""
    workspace = workspace_of(layer, rank.device)
    metainfo = functions.moe_a2a_initialize(workspace, rank.rank, rank.size, layer.max_tokens_per_rank, comm=rank.comm)
    assert not workspace[rank.rank].any()
    results = [
        one_round(layer, workspace, metainfo, rank.rank, in_workspace=in_workspace) for in_workspace in (True, False)
    ]
    del metainfo
    gc.collect()
    return results


@pytest.mark.parametrize("layer", [RAGGED, UNEVEN])
def test_ranks_of_a_group(place: Place, layer: Layer) -> None:
    if layer is UNEVEN and place.size < 4:
        pytest.skip("needs 4 GPUs")
    layer = place.fit(layer)
    for rank, combined in enumerate(place.run(of_a_group, layer)):
        for rows in combined:
            assert same_bits(rows, layer.expected(rank))


def together(ranks: list[int], call: Callable[[int], Any]) -> list[Any]:
    """Calls of ranks in threads."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = call(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for value in found.values():
        if isinstance(value, Exception):
            raise value
    return [found[rank] for rank in ranks]


def test_ranks_of_one_process() -> None:
    layer = UNEVEN
    workspace = workspace_of(layer, "cpu")
    metainfo = [functions.moe_a2a_initialize(workspace, rank, 4, layer.max_tokens_per_rank) for rank in range(4)]

    def run(rank: int) -> list[torch.Tensor]:
        return [one_round(layer, workspace, metainfo[rank], rank, in_workspace=there) for there in (False, True)]

    for rank, combined in enumerate(together([0, 1, 2, 3], run)):
        assert all(same_bits(rows, layer.expected(rank)) for rows in combined)
    assert functions._together
    metainfo.clear()
    gc.collect()
    assert not functions._together


def test_a_metainfo_that_is_collected_while_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finaliser runs in a thread which the call that holds the lock waits for."""
    make = functions._Member.__init__

    def collect_and_make(*args: Any, **options: Any) -> None:
        gc.collect()
        make(*args, **options)

    monkeypatch.setattr(functions._Member, "__init__", collect_and_make)
    layer = replace(RAGGED, num_tokens=(1, 1), no_expert=0.0)

    def begin() -> tuple[torch.Tensor, list[torch.Tensor]]:
        workspace = workspace_of(layer, "cpu")
        return workspace, [functions.moe_a2a_initialize(workspace, rank, 2, 8) for rank in range(2)]

    def play(workspace: torch.Tensor, metainfo: list[torch.Tensor]) -> list[torch.Tensor]:
        return together([0, 1], lambda rank: one_round(layer, workspace, metainfo[rank], rank, in_workspace=False))

    gc.collect()
    gc.disable()
    try:
        old = begin()
        cycle: list[Any] = [old]
        cycle.append(cycle)  # as the traceback of an exception does
        play(*old)
        del old, cycle
        assert len(functions._parts) == 2
        for rank, combined in enumerate(play(*begin())):
            assert same_bits(combined, layer.expected(rank))
        assert not functions._given_up
    finally:
        gc.enable()
    gc.collect()
    assert not functions._together
    assert not functions._parts


def test_a_rank_that_is_left_out() -> None:
    layer = replace(RAGGED, top_k=1, no_expert=0.0)
    workspace = workspace_of(layer, "cpu")
    active = [0, 2, 3]
    mask = functions.moe_a2a_active_rank_mask(active, 4)
    metainfo = {rank: functions.moe_a2a_initialize(workspace, rank, 4, layer.max_tokens_per_rank) for rank in active}

    def run(rank: int) -> torch.Tensor:
        masks = {"enable_rank_mask": True, "active_rank_mask": mask}
        return one_round(layer, workspace, metainfo[rank], rank, in_workspace=False, **masks)

    for rank, rows in zip(active, together(active, run), strict=True):
        lost = layer.table[layer.routes(rank)[0][:, 0].long()] == 1
        assert same_bits(rows, torch.where(lost[:, None], 0, layer.expected(rank)))


def test_a_rank_that_was_left_out_comes_back_with_rows_of_a_new_kind() -> None:
    """The others have agreed on a mask that this rank does not know of."""
    layer = replace(RAGGED, top_k=1, no_expert=0.0, num_tokens=(3, 2, 5, 1))
    workspace = workspace_of(layer, "cpu")
    most = layer.max_tokens_per_rank
    metainfo = [functions.moe_a2a_initialize(workspace, rank, 4, most) for rank in range(4)]

    def play(active: list[int], dtype: torch.dtype) -> None:
        mask = functions.moe_a2a_active_rank_mask(active, 4)
        masks = {"enable_rank_mask": True, "active_rank_mask": mask}

        def run(rank: int) -> None:
            ids, weights = layer.routes(rank)
            rows = layer.rows(rank)[0].to(dtype)
            received, offset, _ = functions.moe_a2a_dispatch(
                ids, [rows, ids, weights], workspace, metainfo[rank], most, rank, 4, 1, layer.num_experts, **masks
            )
            assert received[0].dtype == dtype
            out = received[0].to(torch.bfloat16).contiguous()
            functions.moe_a2a_combine(out, len(ids), workspace, metainfo[rank], most, rank, 4, 1, offset, **masks)

        together(active, run)

    everyone = [0, 1, 2, 3]
    for active, dtype in (
        (everyone, torch.bfloat16),
        ([0, 2, 3], torch.bfloat16),
        (everyone, torch.float16),
        ([0, 2, 3], torch.float16),
        (everyone, torch.bfloat16),
    ):
        play(active, dtype)


def odd_rows(rank: Rank) -> list[torch.Tensor]:
    """A body: payloads that do not say what comes back, then rows of two kinds, and once as FP8."""
    layer = replace(RAGGED, num_tokens=(3, 2))
    size = functions.moe_a2a_get_workspace_size_per_rank(2, 8, 64, 512)
    workspace = torch.zeros(2, size, dtype=torch.uint8)
    metainfo = functions.moe_a2a_initialize(workspace, rank.rank, 2, 8, comm=rank.comm)
    ids, _ = layer.routes(rank.rank)
    flags = torch.ones(len(ids), 1, dtype=torch.bool)
    results = []
    for dtype, low in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, True)):
        got, offset, _ = functions.moe_a2a_dispatch(
            ids, [ids, flags], workspace, metainfo, 8, rank.rank, 2, layer.top_k, layer.num_experts
        )
        rows = got[1].to(dtype).expand(2, 8, 32).contiguous()
        results.append(
            functions.moe_a2a_combine(
                rows, len(ids), workspace, metainfo, 8, rank.rank, 2, layer.top_k, offset, use_low_precision=low
            )
        )
    return results


def test_rows_that_no_payload_stands_for() -> None:
    layer = replace(RAGGED, num_tokens=(3, 2))
    for rank, combined in enumerate(run_ranks(2, odd_rows)):
        ids, _ = layer.routes(rank)
        owners = torch.where(ids < 0, -1, layer.table[ids.clamp(min=0).long()])
        ranks = torch.stack([(owners == peer).any(1) for peer in range(2)]).sum(0)
        for rows in combined:
            assert torch.equal(rows.float(), ranks[:, None].float().expand(-1, 32))


def test_wrong_calls_name_what_is_wrong() -> None:
    workspace = workspace_of(RAGGED, "cpu")
    initialize = functions.moe_a2a_initialize
    with pytest.raises(ValueError, match=r"workspace is \[4, \d+\] torch.uint8, expected \[3"):
        initialize(workspace, 0, 3, 8)
    with pytest.raises(ValueError, match="ep_rank is 4, allowed are 0 to 3"):
        initialize(workspace, 4, 4, 8)
    with pytest.raises(ValueError, match="expected room for rows of 80000 tokens"):
        initialize(workspace, 0, 4, 80000)
    metainfo = initialize(workspace, 0, 4, 8)
    ids, weights = RAGGED.routes(0)
    (x,) = RAGGED.rows(0)
    good = ([x, ids, weights], workspace, metainfo, 8, 0, 4, RAGGED.top_k, RAGGED.num_experts)
    with pytest.raises(ValueError, match="metainfo is not what moe_a2a_initialize returned"):
        functions.moe_a2a_dispatch(ids, good[0], workspace.clone(), *good[2:])
    for count in (0, 9):
        wrong = f"input_payloads has {count} tensors, expected 1 to 8 payloads"
        with pytest.raises(ValueError, match=wrong):
            functions.moe_a2a_dispatch(ids, [x] * count, *good[1:])
    with pytest.raises(ValueError, match=r"expected \[0\] torch.int32: eplb_stats_num_experts is 0"):
        functions.moe_a2a_dispatch(ids, *good, eplb_local_stats=ids)
    mask = functions.moe_a2a_active_rank_mask([1, 2], 4)
    with pytest.raises(ValueError, match="expected None without enable_rank_mask=True"):
        functions.moe_a2a_dispatch(ids, *good, active_rank_mask=mask)
    with pytest.raises(ValueError, match="active_rank_mask leaves out the own ep_rank 0"):
        functions.moe_a2a_dispatch(ids, *good, enable_rank_mask=True, active_rank_mask=mask)
    with pytest.raises(ValueError, match="active_ranks holds 4"):
        functions.moe_a2a_active_rank_mask([4], 4)
    with pytest.raises(ValueError, match="no dispatch of these came before"):
        functions.moe_a2a_combine(x, 3, workspace, metainfo, 8, 0, 4, 3, 0)
    with pytest.raises(ValueError, match="output must be contiguous"):
        functions.moe_a2a_combine(x, 3, workspace, metainfo, 8, 0, 4, 3, 0, output=x.T)
    with pytest.raises(ValueError, match="output must be a CUDA tensor"):
        functions.moe_a2a_combine(x, 3, torch.empty(0), metainfo, 8, 0, 4, 3, 0, output=x)
    with pytest.raises(ValueError, match="not within one rank's part"):
        functions.moe_a2a_wrap_payload_tensor_in_workspace(workspace, [4, 8], 0, workspace.shape[1] + 1, torch.uint8)
