"""A mixture-of-experts layer whose experts are spread over the ranks of a group."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from putget._arguments import check_int, check_tensor
from putget.alltoall import AllToAll
from putget.balancer import BalancedLayer, ExpertBlobs, Placement
from putget.balancer.gathering import LoadGathering
from putget.balancer.recorder import Record
from putget.core.expert_major import ExpertMajor, ExpertMajorMemory
from putget.core.geometry import check_valid_tokens
from putget.errors import PutgetError
from putget.group.communicator import Communicator, collective
from putget.memory.workspace import resolve_device
from putget.moe.experts import Bf16Experts, Fp8Experts, expected_rows
from putget.moe.kernels import GATES, Gate
from putget.moe.loading import DenseState, load_networks, load_router, require_networks, write_networks
from putget.moe.lost import LayerMetrics, LostExperts
from putget.moe.placed import SlotOptions, digest_of, place_experts
from putget.moe.replays import Replays
from putget.moe.router import Placing, Router, Routing
from putget.moe.shared_experts import SharedExperts
from putget.moe.streams import Beside
from putget.moe.traced import LayerOperator
from putget.moe.unwritten import warn_unwritten
from putget.payload import Payload

# From so many tokens on, shared experts fill the SMs by themselves. Experts that began beside them would have some of
# their tiles wait for SMs while the others are done.
_SHARED_FILL_FROM = 1024

_MakeExperts: TypeAlias = Callable[[int, int, int, Gate, torch.device], Bf16Experts | Fp8Experts]


def _check_sizes(hidden_size: int, intermediate_size: int, shared_intermediate_size: int) -> None:
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        check_int(name, size, 1, 1 << 20)
    check_int("shared_intermediate_size", shared_intermediate_size, 0, 1 << 20)


# Arguments of AllToAll that the layer gives itself.
_GIVEN = {"self", "comm", "num_experts", "top_k", "max_tokens_per_rank", "payloads", "output", "device"}
_FURTHER = [name for name in inspect.signature(AllToAll.__init__).parameters if name not in _GIVEN]


def _check_names(all_to_all: Mapping[str, Any]) -> None:
    """Raises TypeError for a name that neither the layer nor its AllToAll takes, as Python does."""
    for name in all_to_all:
        if name not in _FURTHER:
            raise TypeError(
                f"ExpertParallelMoE() got an unexpected keyword argument {name!r}; of AllToAll's it takes "
                f"{', '.join(_FURTHER)}"
            )


class ExpertParallelMoE(nn.Module):
    """Router, dispatch, this rank's experts, combine. Construction is collective over the group. No backward pass.

    Every rank calls ``forward`` for every round, with any number of its own tokens, also none. Nothing waits for the
    host, so a call can be captured in a CUDA graph and replayed with new data, also with graphs of other sizes on other
    ranks; it must have run once before.

    ``.to(dtype)``, ``.bfloat16()`` and the like, of the layer or of a model around it, leave its weights in the types
    that they were made in: codes, their scales and the router's bias mean nothing in another one. A layer stays on its
    device, where its workspace is.

    With `slots` experts may have replicas: each rank has as many slots, a slot holds one expert, and
    the router's ids are turned into slots before dispatch. `set_placement`, which is collective, changes the
    placement between two rounds.

    Args:
        comm: The expert-parallel group.
        hidden_size: Elements of a token.
        intermediate_size: Elements between the two products of an expert.
        num_experts: Routed experts of all ranks together.
        top_k: Experts of a token.
        max_tokens_per_rank: Most tokens of one rank in one round.
        routing: ``SoftmaxRouting`` (the default) or ``GroupLimitedRouting``.
        router_bias: Whether the router has a correction bias.
        router_dtype: Of the router's weight.
        shared_intermediate_size: The same of the shared experts together; 0: there are none.
        weight_dtype: torch.bfloat16, or torch.float8_e4m3fn: weights with a scale per 128x128 block, and rows with a
            scale per 128 values.
        row_dtype: Of the rows that travel; by default weight_dtype. FP8 weights take either: float8_e4m3fn rows are
            quantised before dispatch, bfloat16 ones where they have arrived, to the same codes.
        gate: "silu" or "gelu".
        device: "cuda", "cuda:N" or "cpu".
        overlap_shared: Shared experts run on a second stream while rows travel, which then are dispatched in two
            halves. The CPU has the halves and no streams.
        grouped_memory: Memory for rows by expert that layers of the same sizes share; by default memory of its own.
        nvtx: Whether the steps are marked for Nsight Systems. CUDA only.
        slots: The slots of experts that may have replicas; if None, each rank has its experts once.
        count_experts: Whether the router counts its tokens' experts in `expert_load`.
        degraded: Whether rounds go on without experts that are lost with their ranks. If not, calls raise
            ``ExpertsLost`` after `set_active_ranks` has left their ranks out, until the experts are back. It may be set
            later, too: on the layers of all ranks alike.
        **all_to_all: Further arguments of ``putget.AllToAll``: ``workspace``, ``timeout_s``, ``num_sms``,
            ``combine_dtype``, ``expert_to_rank`` and so on.

    Attributes:
        router: See ``putget.moe.Router``.
        experts: The experts of this rank, by ascending id: ``local_experts``.
        shared: See ``putget.moe.SharedExperts``; or None.
        local_experts: Ids of the experts of this rank; with slots, of each of its slots, -1 where one is empty.
        choose: The ``ReplicaChoice`` between router and dispatch; or None.
        expert_load: [num_experts] int32 on the device: tokens of this rank that have each expert, padding apart, added
            up over the rounds; or None.
        record: Called with the router's ids [num_tokens, top_k] and num_valid_tokens at each round, if not None:
            ``RoutingRecorder.of_layer``.

    Raises:
        ValueError: An argument is wrong, here or on another rank, or differs between ranks.
        BackendUnavailable: This machine or build lacks something.
        PeerTimeout: A rank did not come in time.
    """

    _looked_at_weights = False
    _statistics: LoadGathering | None = None  # statistics that a balancer adds to dispatch
    _replays: Replays | None = None

    @collective
    def __init__(
        self,
        comm: Communicator,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        routing: Routing | None = None,
        router_bias: bool = False,
        router_dtype: torch.dtype = torch.float32,
        shared_intermediate_size: int = 0,
        weight_dtype: torch.dtype = torch.bfloat16,
        row_dtype: torch.dtype | None = None,
        gate: Gate = "silu",
        device: str | torch.device = "cuda",
        overlap_shared: bool = True,
        grouped_memory: ExpertMajorMemory | None = None,
        nvtx: bool = False,
        slots: SlotOptions | None = None,
        count_experts: bool = False,
        degraded: bool = False,
        **all_to_all: Any,
    ) -> None:
        super().__init__()
        if not isinstance(comm, Communicator):
            raise ValueError(f"comm is {comm!r}, expected a putget.Communicator")
        _check_names(all_to_all)
        try:
            _check_sizes(hidden_size, intermediate_size, shared_intermediate_size)
            kind = _kind_of(weight_dtype, row_dtype, gate)
            place = resolve_device(device)
            self.router = Router(
                hidden_size, num_experts, top_k, routing, bias=router_bias, dtype=router_dtype, device=place
            )
            payloads = kind(0, hidden_size, intermediate_size, gate, place).payloads()
            self.shared: SharedExperts | None = None
            if shared_intermediate_size:
                self.shared = SharedExperts(kind(1, hidden_size, shared_intermediate_size, gate, place))
            self._placed = place_experts(comm, num_experts, place, slots, all_to_all)
        except (ValueError, PutgetError) as error:
            comm.refuse(str(error))
            raise
        self.device = place
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.max_tokens_per_rank = max_tokens_per_rank
        self.overlap_shared = overlap_shared
        self.nvtx = nvtx and place.type == "cuda"
        self.num_slots = num_experts if self._placed is None else self._placed.num_slots
        self.choose = None if self._placed is None else self._placed.choose
        self.record: Record | None = None
        self.expert_load = torch.zeros(num_experts, dtype=torch.int32, device=place) if count_experts else None
        self.a2a = AllToAll(
            comm,
            num_experts=self.num_slots,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            payloads=payloads,
            output=Payload((hidden_size,), torch.bfloat16),
            device=place,
            **all_to_all,
        )
        try:
            # Made before anything is captured.
            self.grouped_memory = _grouped_memory(self.a2a, grouped_memory, comm)
            comm.compare(
                "ExpertParallelMoE",
                {
                    "intermediate_size": intermediate_size,
                    "routing": self.router.routing,
                    "router_bias": router_bias,
                    "router_dtype": router_dtype,
                    "shared_intermediate_size": shared_intermediate_size,
                    "weight_dtype": weight_dtype,
                    "gate": gate,
                    "degraded": bool(degraded),
                    "placement": None,
                    **({} if self._placed is None else self._placed.configuration()),
                },
                self.a2a.workspace.warmup_timeout_s,
            )
        except BaseException:
            self.a2a.close()
            raise
        self._lost = LostExperts(self.a2a, self._placed, bool(degraded))
        self.local_experts = _owned(self.a2a, comm.rank) if self._placed is None else self._placed.local_experts
        self._unsure: set[int] = set()  # slots that a load has written which did not come to its end
        self.experts = kind(len(self.local_experts), hidden_size, intermediate_size, gate, place)
        self._beside = Beside(place)
        self._operator = LayerOperator(self, place)

    @classmethod
    def from_dense(
        cls, comm: Communicator, state: Mapping[str, Tensor], *, prefix: str = "", **options: Any
    ) -> ExpertParallelMoE:
        """A layer with the weights of a dense one: the constructor, then ``load_dense``."""
        layer = cls(comm, **options)
        try:
            layer.load_dense(state, prefix=prefix)
        except BaseException:
            layer.close()
            raise
        return layer

    @torch.no_grad()
    def load_dense(self, state: Mapping[str, Tensor], *, prefix: str = "") -> None:
        """Copies this rank's part of a dense layer's weights; BF16 and FP8 are turned into one another.

        Args:
            state: Tensors by the names of DeepSeek-V3's checkpoints: see ``putget.moe.loading.DenseState``. Any
                mapping, also one that reads from a file: only the experts of this rank are looked up.
            prefix: Of all names, such as ``model.layers.3.mlp.``.

        Raises:
            ValueError: A tensor is missing, or has another shape; the message names it, and nothing has changed.
        """
        dense = DenseState(state, prefix)
        dense.router(self.router)  # a missing tensor is found before anything is changed
        if self.shared is not None:
            dense.network("shared_experts", self.hidden_size, self.shared.experts.down.shape[2])
        load_networks(self.experts, [_name_of(expert) for expert in self.local_experts], dense, self._unsure)
        self._unsure.clear()
        if self.shared is not None:
            load_networks(self.shared.experts, ["shared_experts"], dense)
        load_router(self.router, dense)

    @torch.no_grad()
    def set_placement(
        self,
        placement: Placement,
        state: Mapping[str, Tensor] | None,
        *,
        placement_layer: int = 0,
        prefix: str = "",
    ) -> None:
        """Another placement of the same sizes, from the next round on. Captured graphs obey it.

        Collective over the active ranks, between the same two rounds: it is in force on all of them, or on none. On
        CUDA it is ordered on the current stream. A rank waits up to ``warmup_timeout_s`` for the others to come, and
        as long again for them to load weights.

        Args:
            placement: Which expert each slot holds from now on; the same on all ranks.
            state: A dense layer's weights, as for ``load_dense``, for the slots of this rank that get another expert.
                None: the caller has written them already.
            placement_layer: Which layer of `placement` this one is.
            prefix: Of all names in `state`.

        Raises:
            ValueError: The layer has no slots, the placement other sizes, or a tensor is missing, here or on another
                rank, which the message names; or ranks have other placements. Nothing has changed on any rank.
            PeerTimeout: A rank did not come in time; as below.
            PeerLeft: Another rank has raised; as below.
            Exception: As `state` raises it, or a signal's handler. The former placement stays. Slots of each rank may
                have lost their expert, and then calls of the layer raise PutgetError there: set this placement again,
                or the one before, which loads them; so does ``load_dense``.
        """
        if self._placed is None:
            raise ValueError("this layer was made without slots: its experts stay where they are")
        placed, workspace = self._placed, self.a2a.workspace
        members = [rank for rank, is_active in enumerate(workspace.active_ranks) if is_active]

        def load() -> Tensor:
            workspace.require_consistent()
            tables = placed.choose.tables_of(placement, placement_layer)
            changed = self._to_load(placed.local_of(placement, placement_layer))
            names = changed if state is not None else []
            dense = DenseState({} if state is None else state, prefix)
            require_networks(self.experts, names, dense)
            said = {"placement": digest_of(placement, placement_layer)}
            workspace.comm.compare(
                "placement", said, workspace.warmup_timeout_s, members=members, phase="set_placement"
            )
            # From here to the end, whichever way it comes, no round may run: weights and tables do not fit.
            self._unsure.update(slot for slot, name in enumerate(changed) if name is not None)
            write_networks(self.experts, names, dense, self._unsure)
            return tables

        tables = workspace.comm.attempt("set_placement", load, members=members, phase="set_placement")
        placed.choose.tables.copy_(tables)
        self._note_placement(placement, placement_layer)
        self._unsure.clear()

    def _require_experts(self) -> None:
        """Raises PutgetError where a load has not come to its end: the layer's results would be wrong."""
        if self._unsure:
            raise PutgetError(
                f"slot(s) {sorted(self._unsure)} of rank {self.a2a.workspace.comm.rank} may have lost their expert: "
                "a load did not come to its end. set_placement or load_dense loads them"
            )

    def _to_load(self, experts: Sequence[int]) -> list[str | None]:
        """The networks that slots need to hold these experts; None for a slot that has its expert."""
        held = [-1 if slot in self._unsure else expert for slot, expert in enumerate(self.local_experts)]
        return [None if now == before else _name_of(now) for now, before in zip(experts, held, strict=True)]

    def balanced(self) -> BalancedLayer:
        """The part of this layer that a ``putget.balancer.Balancer`` needs.

        Raises:
            ValueError: The layer has no slots, or does not count.
        """
        if self._placed is None or self.expert_load is None:
            raise ValueError("a balancer needs a layer made with slots, and with count_experts=True")
        return BalancedLayer(
            blobs=ExpertBlobs(dict(self.experts.named_parameters()), module=self.experts),
            expert_load=self.expert_load,
            table=self._placed.choose.tables,
            table_of=self._placed.choose.tables_of,
            on_placed=self._note_placement,
            tell=self._set_statistics,
            num_stats=self.a2a.num_stats,
        )

    def _note_placement(self, placement: Placement, layer: int) -> None:
        assert self._placed is not None
        self.local_experts = self._placed.local_of(placement, layer)
        self._placed.note(placement, layer)
        self._lost.look_again()

    def _set_statistics(self, statistics: LoadGathering | None) -> None:
        self._statistics = statistics
        if self._replays is not None:
            self._replays.forget()

    def replay_calls(self, max_tokens: int) -> None:
        """From now on calls with at most so many tokens are CUDA graphs, which the layer captures by itself.

        For eager programs with small batches, where the host's part of a call is longer than the GPU's. Batches are
        padded to powers of two, so results are those of a padded batch: a product of another size may round otherwise.
        The first two calls of a size take longer. A graph counts on the layer's parameters where they are; where one
        has been replaced, the next call is captured again. Calls with `record`, or inside of a capture, are as before;
        so are all on the CPU, which has no graphs. Ranks need not do the same. After a capture the host does not know
        the workspace's rounds any more: calls of its objects out of turn are found by the device, later.

        Args:
            max_tokens: From 1 to ``max_tokens_per_rank``; 0: no call any more, and the graphs are given up.

        Raises:
            ValueError: max_tokens is out of range, or the group's ranks are emulated on one GPU: a capture waits for
                the device, where kernels wait for ranks that have not been called.
        """
        check_int("max_tokens", max_tokens, 0, self.max_tokens_per_rank)
        comm = self.a2a.workspace.comm
        if max_tokens and comm.size > 1 and comm._local_group is not None:
            raise ValueError(f"max_tokens is {max_tokens}, expected 0 for {comm.size} ranks that share a GPU")
        self._replays = None
        if max_tokens and self.device.type == "cuda":
            self._replays = Replays(self, self._lost, max_tokens)

    @torch.no_grad()
    def forward(
        self, x: Tensor, *, num_valid_tokens: Tensor | None = None, busiest_tokens: int | None = None
    ) -> Tensor:
        """The layer.

        It computes in the types of its weights, its router in float32, whatever ``torch.autocast`` says. Under autocast
        x may be of any floating type: it becomes bfloat16, as it would before a product.

        Args:
            x: [num_tokens, hidden_size] bfloat16, contiguous; num_tokens up to max_tokens_per_rank, also 0.
            num_valid_tokens: One int32 on the device: tokens from there on go to no routed expert (a padded graph).
            busiest_tokens: Most tokens that any rank has in this round, where the caller knows: kernels are chosen for
                it. It changes the speed alone. By default this rank's own; one without tokens is ready for all.
                ``torch.compile`` leaves it out.

        Returns:
            [num_tokens, hidden_size] bfloat16: routed experts and shared experts.

        Raises:
            ValueError: x is wrong; nothing has happened on any rank.
            ExpertsLost: Experts were lost with ranks that were left out, and `degraded` is False. Replays of a graph do
                not ask: `check` does.
            PutgetError: A load of weights has not come to its end: see ``set_placement``.
            PeerTimeout: A rank is missing. On CUDA a later call raises it.
        """
        if torch.is_autocast_enabled(self.device.type) and isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(torch.bfloat16)
        if torch.compiler.is_compiling():
            return self._operator(x, num_valid_tokens)
        if self._replays is not None and self.record is None:
            self._require_experts()
            self.check_input("x", x)
            if self._replays.takes(x.shape[0]):
                check_valid_tokens(num_valid_tokens, self.device)
                check_int(
                    "busiest_tokens", 0 if busiest_tokens is None else busiest_tokens, 0, self.max_tokens_per_rank
                )
                return self._replays(x, num_valid_tokens, busiest_tokens)
        return self.run(x, num_valid_tokens, busiest_tokens)

    def run(self, x: Tensor, num_valid_tokens: Tensor | None, busiest_tokens: int | None = None) -> Tensor:
        """The work of ``forward``; ``torch.compile`` sees it as one operator."""
        if torch.is_autocast_enabled(self.device.type):  # it would change the types of products and of the router
            with torch.autocast(self.device.type, enabled=False):
                return self.run(x, num_valid_tokens, busiest_tokens)
        self.check_input("x", x)
        check_valid_tokens(num_valid_tokens, self.device)
        check_int("busiest_tokens", 0 if busiest_tokens is None else busiest_tokens, 0, self.max_tokens_per_rank)
        if num_valid_tokens is not None:
            num_valid_tokens = num_valid_tokens.view(1)
        self._require_experts()
        self._lost.begin_round()
        if not self._looked_at_weights:
            self._looked_at_weights = warn_unwritten(self.experts)
        ids, weights, payloads = self.route(x, num_valid_tokens)
        further: dict[str, Any] = {
            "num_valid_tokens": num_valid_tokens,
            "stats": None if self._statistics is None else self._statistics.stats,
            "busiest_tokens": busiest_tokens,
        }
        overlapped = self.overlap_shared and self.shared is not None
        if not overlapped:
            return self._round(ids, weights, payloads, further, overlapped)
        self._beside.fork()
        try:
            return self._round(ids, weights, payloads, further, overlapped)
        except BaseException:
            self._beside.join()  # no capture ends with work of the second stream in it
            raise

    def _round(
        self, ids: Tensor, weights: Tensor, payloads: tuple[Tensor, ...], further: dict[str, Any], overlapped: bool
    ) -> Tensor:
        """Dispatch, experts and combine; overlapped: the second stream has been forked."""
        a2a, num_tokens = self.a2a, len(ids)
        if not overlapped:
            with self.range("dispatch"):
                received = a2a.dispatch(ids, weights, *payloads, **further)
            addend = self.run_shared(payloads)
        else:
            with self.range("dispatch_start"):
                a2a.dispatch_start(ids, weights, *payloads, **further)
            with self._beside.on_it():
                addend = self.run_shared(payloads)
            with self.range("dispatch_finish"):
                received = a2a.dispatch_finish()
        if self._statistics is not None and received.stats is not None:
            self._statistics.hear(received.stats)
        busiest = max(num_tokens, further["busiest_tokens"] or 0)
        scattered = self.experts.takes_scattered(self._expected_rows(busiest))
        with self.range("expert_major"):
            grouped = received.expert_major(memory=self.grouped_memory, copy_rows=not scattered)
        if overlapped and num_tokens >= _SHARED_FILL_FROM:
            self._beside.join()
        rows = self.run_experts(grouped, busiest, received.flat.payloads if scattered else None)
        if overlapped and num_tokens < _SHARED_FILL_FROM:
            self._beside.join()
        with self.range("combine"):
            return a2a.combine(rows, layout=grouped, addend=addend)

    # --- the steps ----------------------------------------------------------------------------------------------------

    def check_input(self, name: str, x: Tensor) -> None:
        """Raises ValueError where x is not [up to max_tokens_per_rank, hidden_size] bfloat16 on the device."""
        rows = x.shape[0] if isinstance(x, Tensor) and x.dim() else 0
        check_tensor(name, x, (rows, self.hidden_size), (torch.bfloat16,), self.device)
        if rows > self.max_tokens_per_rank:
            raise ValueError(f"{name} has {rows} tokens, max_tokens_per_rank is {self.max_tokens_per_rank}")

    def route(self, x: Tensor, num_valid_tokens: Tensor | None = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """ids (with slots: theirs) and weights of the tokens' experts, and the payloads to dispatch."""
        with self.range("route"):
            if self.record is None:
                ids, weights = self.router(x, Placing(self.choose, self.expert_load, num_valid_tokens))
            else:
                ids, weights = self.router(x, Placing(None, self.expert_load, num_valid_tokens))
                self.record(ids, num_valid_tokens)
                ids = Placing(self.choose, None, num_valid_tokens)(ids)
            return ids, weights, self.experts.prepare(x)

    def run_shared(self, payloads: tuple[Tensor, ...]) -> Tensor | None:
        """The shared experts' output, [num_tokens, hidden_size]; None where there are none."""
        if self.shared is None:
            return None
        with self.range("shared_experts"):
            output: Tensor = self.shared(payloads)
            return output

    def _expected_rows(self, num_tokens: int) -> int:
        """The rows of an expert if every rank has as many tokens. Without any this rank knows nothing of the others."""
        return expected_rows(num_tokens or self.max_tokens_per_rank, self.a2a.ep_size, self.top_k, self.num_slots)

    def run_experts(self, grouped: ExpertMajor, num_tokens: int, scattered: Sequence[Tensor] | None = None) -> Tensor:
        """The output of this rank's experts for the rows that came, [capacity, hidden_size].

        num_tokens are those of the busiest rank, as far as this one knows; scattered are the rows as they arrived,
        where `grouped` has none of them.
        """
        with self.range("experts"):
            rows: Tensor
            expected = self._expected_rows(num_tokens)
            if scattered is None:
                rows = self.experts(grouped.payloads, grouped, expected)
            else:
                rows = self.experts(scattered, grouped, expected, grouped.source_rows)
            return rows

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Marks a step for Nsight Systems where that is asked for."""
        if not self.nvtx:
            yield
            return
        torch.cuda.nvtx.range_push(f"putget.moe.{name}")  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertParallelMoE:
        """The treatment of each tensor by ``.to()``, ``.bfloat16()``, ``.cuda()`` and so on.

        Raises:
            ValueError: It would leave the device; nothing has changed.
        """

        def keep(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            if made.device != tensor.device:
                raise ValueError(
                    f"this layer is on {tensor.device}, where its workspace is, and cannot move to {made.device}: make "
                    "it there with device="
                )
            return made if made.dtype == tensor.dtype else tensor

        module: ExpertParallelMoE = super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return module

    # --- ranks that are lost ------------------------------------------------------------------------------------------

    @property
    def degraded(self) -> bool:
        """Whether rounds go on without experts that are lost with their ranks. Set it on all ranks alike."""
        return self._lost.degraded

    @degraded.setter
    def degraded(self, value: bool) -> None:
        self._lost.degraded = value

    def metrics(self) -> LayerMetrics:
        """Which ranks and experts are lost, since when, and how many rounds ran without them. Waits for no peer."""
        return self._lost.metrics()

    def check(self) -> None:
        """See ``AllToAll.check``. It also raises ``ExpertsLost`` and ``PutgetError`` as `forward` does."""
        self._require_experts()
        self.a2a.check()
        self._lost.require()

    def close(self) -> None:
        """See ``AllToAll.close``. Weights stay."""
        self._replays = None
        self.a2a.close()

    def __enter__(self) -> ExpertParallelMoE:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._replays = None
        self.a2a.__exit__(*exception)


def _grouped_memory(a2a: AllToAll, given: ExpertMajorMemory | None, comm: Communicator) -> ExpertMajorMemory:
    """Memory for rows by expert.

    Raises:
        ValueError: The given one does not fit; the other ranks hear of it.
    """
    if given is None:
        return a2a.expert_major_memory()
    try:
        return a2a.check_expert_major_memory(given)
    except ValueError as error:
        refused = ValueError(f"grouped_{error}")
        comm.refuse(str(refused))
        raise refused from error


def _owned(a2a: AllToAll, rank: int) -> list[int]:
    """The experts of a rank, by ascending id."""
    return [expert for expert, owner in enumerate(a2a.expert_to_rank.tolist()) if owner == rank]


def _kind_of(weight_dtype: torch.dtype, row_dtype: torch.dtype | None, gate: Gate) -> _MakeExperts:
    """Makes experts of these types.

    Raises:
        ValueError: One is not allowed, or they do not go together.
    """
    if weight_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(f"weight_dtype is {weight_dtype}, allowed are torch.bfloat16 and torch.float8_e4m3fn")
    if gate not in GATES:
        raise ValueError(f"gate is {gate!r}, allowed are {' and '.join(map(repr, GATES))}")
    allowed = (torch.bfloat16, weight_dtype)
    if row_dtype not in (None, *allowed):
        named = " or ".join(map(str, dict.fromkeys(allowed)))
        raise ValueError(f"row_dtype is {row_dtype}, with weights of {weight_dtype} expected {named}")
    if weight_dtype == torch.bfloat16:
        return Bf16Experts
    return partial(Fp8Experts, row_dtype=row_dtype or weight_dtype)


def _name_of(expert: int) -> str | None:
    """The networks of an expert in a dense layer's weights; None of an empty slot."""
    return None if expert < 0 else f"experts.{expert}"
