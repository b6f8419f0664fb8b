"""The four-payload form of TensorRT-LLM: hidden states, scale factors, experts and router weights in one dispatch.

The arguments, their order and the flattened results are those of TensorRT-LLM's communication classes for
mixture-of-experts layers (``NVLinkOneSided`` and its siblings), so this class stands where one of them stood.
``install()`` puts it where TensorRT-LLM's factory finds ``NVLinkOneSided``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from putget import AllToAll, Communicator, Payload
from putget.adapters import placement
from putget.adapters.engines import announce, replace_name, require_arguments, require_supported
from putget.adapters.rounds import Rounds, check_stats
from putget.adapters.shared import (
    TIMEOUT_S,
    WARMUP_TIMEOUT_S,
    combine_dtype_of,
    communicator_of,
    engine_workspace_bytes,
    shared_workspace,
)


class FourPayloadAllToAll:
    """Dispatch and combine of one layer with TensorRT-LLM's arguments. Construction is collective over the group.

    Layers of equal sizes share one workspace and are used one after the other. Received experts are global ids; every
    slot without a token has -1. Ranks may have different numbers of tokens, zero included.

    Args:
        mapping: TensorRT-LLM's Mapping where the world is the expert-parallel group; or a torch.distributed group, or a
            ``putget.Communicator``.
        num_slots: Physical expert slots of all ranks together.
        top_k: Experts of a token, 1 to 32.
        max_num_tokens_per_rank: Most tokens that one rank sends in one round.
        payload_in_workspace: Whether ``combine`` is given the tensor of ``get_combine_payload_tensor_in_workspace``.
            Either works without it: combine sees where its rows lie.
        hidden_size: Length of the row that experts return.
        dtype: Its element type: bfloat16, float16 or float32.
        num_experts: How many numbers ``eplb_local_stats`` has, at most num_slots; None: there are none.
        use_low_precision_combine: Rows come back as E4M3 with one float32 scale for 128 values, half of the bytes; the
            sum and the result are as without it. hidden_size is a multiple of 16.
        ep_group_health: Must be None; ``all_to_all.recover`` goes on without a rank.
        alltoall_watchdog_timeout_s: Deadline of every wait, in seconds, in the place of timeout_s.
        alltoall_watchdog_poll_interval_s: Not used: kernels watch their deadline themselves.
        alltoall_watchdog_on_timeout: Must be None: a missing rank is ``putget.PeerTimeout``.
        extra_payload_bytes_per_token: Bytes of scale factors beyond what hidden_size x dtype leaves room for.
        expert_to_rank: [num_slots] owner of each slot; None: equal blocks, for a num_slots that divides by the ranks.
        device: Where the rows live; by default the current CUDA device, or the CPU where there is none.
        timeout_s: Deadline of every wait, in seconds.
        warmup_timeout_s: Deadline of set-up and first rounds, in seconds.

    Raises:
        ValueError: An argument is wrong or not supported; the message names it.
        BackendUnavailable, PeerTimeout: As ``putget.Workspace``.
    """

    def __init__(
        self,
        mapping: Any,
        num_slots: int,
        top_k: int,
        max_num_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
        num_experts: int | None = None,
        use_low_precision_combine: bool = False,
        ep_group_health: Any = None,
        alltoall_watchdog_timeout_s: float | None = None,
        alltoall_watchdog_poll_interval_s: float | None = None,
        alltoall_watchdog_on_timeout: Any = None,
        *,
        extra_payload_bytes_per_token: int = 0,
        expert_to_rank: Sequence[int] | torch.Tensor | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = TIMEOUT_S,
        warmup_timeout_s: float = WARMUP_TIMEOUT_S,
    ) -> None:
        if hidden_size is None:
            raise ValueError("hidden_size is None, expected the length of a row: the workspace is sized by it")
        if num_experts is not None and not 1 <= num_experts <= num_slots:
            raise ValueError(f"num_experts is {num_experts}, expected None or 1 to num_slots, which is {num_slots}")
        require_supported(
            ep_group_health=(ep_group_health, None), alltoall_watchdog_on_timeout=(alltoall_watchdog_on_timeout, None)
        )
        output = Payload((hidden_size,), torch.bfloat16 if dtype is None else dtype)
        combine_dtype = combine_dtype_of(use_low_precision_combine)
        comm = communicator_from(mapping)
        shared = shared_workspace(
            comm,
            engine_workspace_bytes(
                ep_size=comm.size,
                max_tokens_per_rank=max_num_tokens_per_rank,
                dispatch_bytes=output.row_bytes + extra_payload_bytes_per_token,
                output=output,
                combine_dtype=combine_dtype,
            ),
            device,
            timeout_s=timeout_s if alltoall_watchdog_timeout_s is None else alltoall_watchdog_timeout_s,
            warmup_timeout_s=warmup_timeout_s,
            arguments={
                "max_num_tokens_per_rank": max_num_tokens_per_rank,
                "hidden_size": hidden_size,
                "dtype": output.dtype,
                "extra_payload_bytes_per_token": extra_payload_bytes_per_token,
            },
        )
        self.ep_size = comm.size
        self.ep_rank = comm.rank
        self.device = shared.device
        self.mapping = mapping
        self.payload_in_workspace = payload_in_workspace
        self.use_low_precision_combine = use_low_precision_combine
        self.invalid_token_expert_id = -1
        self.enable_eplb = num_experts is not None
        self.eplb_stats_num_experts = num_experts
        self.num_experts = num_slots
        self.top_k = top_k
        self.max_num_tokens_per_rank = max_num_tokens_per_rank
        self._rounds = Rounds(
            shared,
            num_experts=num_slots,
            top_k=top_k,
            max_tokens_per_rank=max_num_tokens_per_rank,
            output=output,
            expert_to_rank=(
                placement.even(num_slots, comm.size, engine="TensorRT-LLM")
                if expert_to_rank is None
                else placement.given(expert_to_rank, num_slots, comm.size)
            ),
            combine_dtype=combine_dtype,
            num_stats=num_experts or 0,
        )
        self._gathered: torch.Tensor | None = None

    @property
    def all_to_all(self) -> AllToAll:
        """The ``putget.AllToAll`` of the last dispatch, e.g. for ``recover``."""
        return self._rounds.all_to_all

    @staticmethod
    def is_platform_supported() -> bool:
        """True: what a machine lacks is said when it is used."""
        return True

    def supports_post_quant_dispatch(self) -> bool:
        """True: rows travel as they come, quantised or not."""
        return True

    def is_workload_feasible(self, all_rank_num_tokens: Sequence[int], num_chunks: int = 1) -> bool:
        """Whether every rank's tokens, in so many chunks, fit into the workspace."""
        most = max(all_rank_num_tokens, default=0)
        return -(-most // max(num_chunks, 1)) <= self.max_num_tokens_per_rank

    def prepare_dispatch(self, *_: Any, **__: Any) -> None:
        """Nothing has to be prepared."""

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        hidden_states_sf: torch.Tensor | None,
        token_selected_experts: torch.Tensor | None = None,
        token_final_scales: torch.Tensor | None = None,
        all_rank_num_tokens: Sequence[int] | None = None,
        use_dp_padding: bool | None = None,
        *,
        token_selected_slots: torch.Tensor | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """Puts each token's rows into the ranks of its experts.

        Args:
            hidden_states: [num_tokens, *], quantised or not.
            hidden_states_sf: [num_tokens, *] scale factors, or None.
            token_selected_experts: [num_tokens, top_k] int32 or int64 expert slots; -1 is "no expert".
            token_final_scales: [num_tokens, top_k] float32 router weights, or None.
            all_rank_num_tokens: Tokens of every rank, where the engine knows them: their maximum bounds the slots that
                this rank looks at. None: max_num_tokens_per_rank.
            use_dp_padding: Not needed; accepted.
            token_selected_slots: Another name of token_selected_experts.
            eplb_local_stats: [num_experts] int32 that every rank gets (``get_eplb_gathered_statistics``), or None.
            **kwargs: Only None values are supported.

        Returns:
            The four, in the order of the arguments (None where None came), each flattened to
            [ep_size * max_tokens_per_rank, *] where max_tokens_per_rank is the maximum above: views into the workspace,
            valid until combine. Experts are int32.

        Raises:
            ValueError: An argument is wrong; nothing has happened on any rank.
            ProtocolMisuse: The last dispatch has not been combined.
            PeerTimeout, CapacityExceeded: As ``AllToAll.dispatch``.
        """
        unknown = [name for name, value in kwargs.items() if value is not None]
        if unknown:
            raise ValueError(f"{unknown[0]} is not supported by dispatch; supported are the four payloads")
        experts = token_selected_slots if token_selected_experts is None else token_selected_experts
        if experts is None:
            raise ValueError("token_selected_experts is None, expected a tensor [num_tokens, top_k]")
        payloads, names = [hidden_states], ["hidden_states"]
        if hidden_states_sf is not None:
            payloads.append(hidden_states_sf)
            names.append("hidden_states_sf")
        max_rows = None if all_rank_num_tokens is None else max(*all_rank_num_tokens, 1)
        check_stats(eplb_local_stats, self._rounds.num_stats, "num_experts")
        arrived = self._rounds.dispatch(
            experts, token_final_scales, payloads, names=names, max_rows=max_rows, stats=eplb_local_stats
        )
        received = arrived.flat
        self._gathered = None if eplb_local_stats is None else arrived.stats
        return (
            received.payloads[0],
            received.payloads[1] if hidden_states_sf is not None else None,
            received.topk_ids,
            None if token_final_scales is None else received.topk_weights,
        )

    def get_eplb_gathered_statistics(self) -> torch.Tensor | None:
        """[ep_size, num_experts] int32: what each rank gave the last dispatch as ``eplb_local_stats``.

        A view into the workspace, valid until combine. None if this rank gave none, and after combine.

        Raises:
            ValueError: The object was made without num_experts.
        """
        if not self.enable_eplb:
            raise ValueError("num_experts is None: this object was made without statistics")
        return self._gathered

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[ep_size * max_tokens_per_rank, hidden_size] in the workspace: experts may write here, without a copy.

        Raises:
            ValueError: The sizes are not those of the last dispatch.
            ProtocolMisuse: No dispatch came before.
        """
        return self._rounds.combine_input(runtime_max_tokens_per_rank, Payload((hidden_size,), dtype))

    def combine(self, final_hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Gets each token's rows back and sums them.

        Args:
            final_hidden_states: [ep_size * max_tokens_per_rank, hidden_size], or [ep_size, max_tokens_per_rank,
                hidden_size], in the order of the rows that dispatch returned: the weighted sum over this rank's
                experts.
            **kwargs: Only None values are supported.

        Returns:
            [num_tokens, hidden_size].

        Raises:
            ValueError: Rows of another shape, dtype or layout; nothing has happened on any rank.
            ProtocolMisuse: No dispatch came before.
            PeerTimeout: As ``AllToAll.combine``.
        """
        unknown = [name for name, value in kwargs.items() if value is not None]
        if unknown:
            raise ValueError(f"{unknown[0]} is not supported by combine; supported is final_hidden_states")
        combined = self._rounds.combine(final_hidden_states, name="final_hidden_states")
        self._gathered = None
        return combined

    def reset_state(self) -> None:
        """Gives up a round that was dispatched and will not be combined, on all ranks alike."""
        self._rounds.release()
        self._gathered = None

    def destroy(self) -> None:
        """Does nothing: the workspace is shared; ``putget.adapters.shared.close_shared`` frees it."""


def communicator_from(mapping: Any) -> Communicator:
    """The communicator of a Mapping, a process group or a communicator.

    Raises:
        ValueError: The mapping's expert-parallel group is not the world.
    """
    moe_ep_size = getattr(mapping, "moe_ep_size", None)
    if moe_ep_size is None:
        return communicator_of(mapping)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world == moe_ep_size:
            return communicator_of(None)
        raise ValueError(
            f"mapping has moe_ep_size {moe_ep_size}, the world has {world} ranks: pass the torch.distributed group of "
            "the expert-parallel ranks instead"
        )
    raise ValueError("mapping: torch.distributed is not initialised")


_MODULE = "tensorrt_llm._torch.modules.fused_moe.communication.nvlink_one_sided"


def install(group: Any = None) -> None:
    """Puts putget where TensorRT-LLM's ``CommunicationFactory`` finds ``NVLinkOneSided``, its first choice.

    Call it in every worker, before or after TensorRT-LLM is imported, and before the model is made. The factory passes
    over a choice that cannot be made and takes the next one; with ``TRTLLM_FORCE_COMM_METHOD=NVLINK_ONE_SIDED`` it
    raises the reason instead.

    Args:
        group: The expert-parallel group: a torch.distributed group, a ``putget.Communicator``, or a function that gives
            one for a Mapping. None: the world of torch.distributed.

    Raises:
        BackendUnavailable: This TensorRT-LLM has no such class, or one with arguments that putget does not know.
    """
    replace_name(_MODULE, "NVLinkOneSided", functools.partial(_in_place_of, group), engine="TensorRT-LLM")


def _in_place_of(group: Any, original: Any) -> type:
    """A class for the factory; it is the original's kind, too, because the engine asks for that."""
    require_arguments("TensorRT-LLM", original, FourPayloadAllToAll)
    named: Callable[[Any], Any] = group if callable(group) else lambda mapping: mapping if group is None else group

    @functools.wraps(original.__init__)
    def make(self: Any, mapping: Any, num_slots: int, *args: Any, **options: Any) -> None:
        comm = communicator_from(named(mapping))
        owners = placement.linear(num_slots, comm.size)
        FourPayloadAllToAll.__init__(self, comm, num_slots, *args, expert_to_rank=owners, **options)
        self.mapping = mapping
        announce("tensorrt_llm", comm, num_experts=num_slots, device=self.device)

    return type(original.__name__, (FourPayloadAllToAll, original), {"__init__": make, "__module__": __name__})


__all__ = ["FourPayloadAllToAll", "install"]
