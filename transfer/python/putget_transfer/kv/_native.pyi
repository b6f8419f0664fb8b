"""Types of the compiled part of `putget_transfer.kv`. Times are in seconds, lengths and offsets in bytes.

Every method raises ValueError for a caller's mistake, before any effect, and EngineClosed once the engine is closed.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, final

from typing_extensions import Self

from putget_transfer._native import Engine, EngineError, MrHandle
from putget_transfer.kv._regions import Region

class ReceiveFailed(EngineError):
    """A request will not arrive. Nothing writes to its pages any more, so they may be used again."""

@final
class Geometry:
    """Where the bytes of one rank's cache lie. Both sides plan a request from geometries alone."""

    def __new__(
        cls, model: str, regions: Sequence[Region], memory: Sequence[int], *, rank: int = 0, context_bytes: int = 0
    ) -> Geometry:
        """Check and keep a geometry.

        Args:
            model: What else both sides must have in common: model, dtype, version.
            regions: In the order in which the rank computes their layers.
            memory: Bytes of each registered memory.
            rank: The rank inside its tensor-parallel group.
            context_bytes: Bytes that travel beside the pages: hidden state, logits, first token.

        Raises:
            ValueError: A region leaves its memory, overlaps itself, or has a value that is not possible.
        """

    @staticmethod
    def from_bytes(data: bytes) -> Geometry:
        """Read what `to_bytes` wrote."""

    def to_bytes(self) -> bytes: ...
    @property
    def digest(self) -> str:
        """Eight bytes in hexadecimal digits that differ where geometries do."""

    @property
    def num_groups(self) -> int:
        """How many lists of pages a request has."""

    def num_pages(self, first_token: int, tokens: int) -> list[int]:
        """Return how many pages each list of a target has for tokens from `first_token` to `tokens`."""

    def describe(self) -> str:
        """Return one line for each region."""

class Cache:
    """A rank's cache in registered memory. `KvCache` makes one from tensors."""

    def __new__(cls, engine: Engine, geometry: Geometry, memory: Sequence[MrHandle]) -> Self: ...
    @property
    def geometry(self) -> Geometry: ...
    def describe(self) -> str:
        """Return one line for each region."""

@final
class Plan:
    """The portions that all sources of one target send for a request."""

    @property
    def count(self) -> int:
        """The count that the target waits for."""

    @property
    def num_bytes(self) -> int:
        """Bytes of pages and states; the context comes on top."""

    @property
    def num_writes(self) -> int: ...
    def of(self, source: int) -> SourcePlan:
        """Return what one source sends."""

    def show(self) -> str:
        """Return a table of sources and portions."""

@final
class SourcePlan:
    """The portions that one source sends."""

    @property
    def count(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_writes(self) -> int: ...
    @property
    def context(self) -> bool:
        """Whether it sends the context."""

    @property
    def portions(self) -> list[tuple[int, int, int, int, int]]:
        """First token, last token plus one, layers that must be done, bytes and writes of each portion."""

def plan(
    sources: Sequence[Geometry],
    target: Geometry,
    *,
    request_id: str,
    tokens: int,
    first_token: int = 0,
    segment_tokens: int = 1024,
    draw: int | None = None,
) -> Plan:
    """Plan a request: which source writes which bytes. Equal arguments give equal plans, on every host.

    Args:
        sources: The prefill ranks' geometries.
        target: The decode rank's.
        request_id: The request's name on both sides.
        tokens: How many tokens the prefill computes.
        first_token: The first that the target does not have.
        segment_tokens: Tokens that leave together as soon as they are computed.
        draw: Which of several copies of a head is taken. A decoder draws by the bytes that it has asked each source
            for, and its `Receive.draw` gives the plan that both sides follow. None: it is drawn from `request_id`.

    Raises:
        ValueError: The sides differ in what they must share, or no source holds a head; both values are named.
    """

def strides(layout: str, sizes: tuple[int, int, int, int, int]) -> list[int]:
    """Return the strides of layers, pages, heads and tokens in one tensor.

    Args:
        layout: One of LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and BHLNC.
        sizes: Layers, pages, heads, tokens of a page, bytes of one head's token.
    """

@final
class Prefiller:
    """The prefill side of an engine: what is computed leaves for the decoders that have asked for it."""

    def __new__(
        cls, cache: Cache, *, lease_s: float = 30.0, max_requests: int = 1024, pace_us: int | None = 20
    ) -> Prefiller:
        """Begin to take requests for a cache.

        Args:
            cache: The cache that is computed into.
            lease_s: How long the pages of a finished prefill are kept for a decoder that has not asked yet.
            max_requests: Requests that may be known at a time.
            pace_us: Microseconds between two looks at the word while something waits for it, at most 500. None: the
                word is looked at less and less often.
        """

    def source(self) -> bytes:
        """Return what decoders must know: address and geometry."""

    @property
    def word(self) -> int:
        """The address of the word that says what is computed: kernels store `step << 16 | layers` to it."""

    def begin_step(
        self, step: int, work: Sequence[tuple[str, int, Sequence[Any]]], stream: object | None = None
    ) -> None:
        """Say what the next forward step computes.

        Args:
            step: A number that ascends.
            work: For each request its name, the tokens that are computed when the step is over, and its lists of pages:
                one for each group, with a page for every page of those tokens from the request's beginning.
            stream: The CUDA stream that computes the step: torch's, or its handle. The kernels of `layer_done` that run
                on it from now on belong to this step. Not inside a capture. None: the host says what is done.

        Raises:
            ValueError: The step does not ascend, tokens go back, pages are missing or outside, or no kernel can be put
                on the stream: there is no driver, or no context.
        """

    def layer_done(self, layer: int, stream: object | None = None) -> None:
        """Say that layers of the present step are done, up to and with this one.

        Args:
            layer: Its place in the order in which layers are computed.
            stream: The stream that computes it. The word changes when all that is on the stream so far is done. A CUDA
                graph may capture this: a replay reports the step that `begin_step` began before it, and nothing before
                the first. None: the layers are done now.
        """

    def end_step(self, stream: object | None) -> None:
        """Say that what follows on a stream belongs to no step: warm-up, capture and dummy passes.

        Args:
            stream: As that of `begin_step`.
        """

    def finish(self, request_id: str, context: bytes | None = None) -> None:
        """Say that a prefill is over, with its context: at most the cache's `context_bytes`."""

    def fail(self, request_id: str, reason: str) -> None:
        """Say that a prefill has failed: decoders are told when nothing of it is under way. Later ones are refused.

        Raises:
            ValueError: It is over.
        """

    def rewind(self, request_id: str) -> bool:
        """Say that a request's pages are taken away before its prefill is over, as where an engine preempts it.

        What has left counts. The rest leaves when its tokens are computed again, in other pages.

        Returns:
            Whether nothing is read from the pages any more. If not they must stay for now, and the caller asks again.

        Raises:
            ValueError: Its prefill is over.
        """

    def poll(self) -> list[tuple[str, str]]:
        """Return the requests whose pages have come back, and why: "sent", "cancelled", "expired" or "failed".

        Call it now and then: it also ends leases.
        """

    def drain(self) -> bool:
        """Take no new requests from now on; return whether none is left."""

    def metrics_text(self) -> str:
        """Return the counts as text for Prometheus."""

@final
class Sources:
    """The prefill ranks that compute a request together, in the order of the plan."""

    def __len__(self) -> int: ...

@final
class Decoder:
    """The decode side of an engine: it owns the transfer of a request.

    Drop it when all receives are over. If one was open, its pages may still be written to, and nobody says until when.
    """

    def __new__(cls, cache: Cache, *, max_requests: int = 1024, confirm_s: float = 5.0) -> Decoder:
        """Begin to ask for a cache.

        Args:
            cache: The cache whose pages are filled.
            max_requests: Requests that may be under way or in quarantine at a time.
            confirm_s: How long a prefiller may take to confirm a cancel before it is fenced.
        """

    def sources(self, sources: Sequence[bytes]) -> Sources:
        """Check prefill ranks, as `Prefiller.source` describes them, against this cache.

        Raises:
            ValueError: The caches do not fit; both values are named.
        """

    def request(
        self,
        sources: Sources,
        request_id: str,
        pages: Sequence[Any],
        *,
        tokens: int,
        first_token: int = 0,
        segment_tokens: int = 1024,
        num_targets: int = 1,
        deadline_s: float = 60.0,
    ) -> Receive:
        """Ask prefill ranks for a request, before, during or after its prefill.

        Args:
            sources: The prefill ranks.
            request_id: The request's name on both sides.
            pages: One list of page numbers for each group, as long as `Geometry.num_pages` says. They belong to the
                request until it has arrived or was released.
            tokens: How many tokens the prefill computes.
            first_token: The first that the cache does not have.
            segment_tokens: Tokens that leave together as soon as they are computed.
            num_targets: How many decode ranks ask for this request.
            deadline_s: Time until the request fails.

        Raises:
            ValueError: Pages are missing, repeated, outside, or another request's.
            EngineBusy: There are `max_requests`.
        """

    def renew(self, sources: Sources, request_id: str) -> None:
        """Tell prefill ranks that this decoder will ask for a request: they keep its pages for another lease."""

    def poll(self) -> tuple[list[int], list[tuple[int, str]], list[int]]:
        """Return what happened, by `Receive.number`: arrived, failed with the reason, released."""

    @property
    def quarantined(self) -> int:
        """Pages of failed requests that may still be written to."""

    def metrics_text(self) -> str:
        """Return the counts as text for Prometheus."""

@final
class Receive:
    """A request under way. Await it, wait for it, or look at it."""

    @property
    def number(self) -> int: ...
    @property
    def draw(self) -> int:
        """Which copies of heads were asked for: with it, `plan` returns the plan that both sides follow."""

    @property
    def state(self) -> str:
        """One of "asked", "accepted", "arrived", "failed" (its pages may still be written to) and "released"."""

    @property
    def reason(self) -> str | None:
        """Why it has failed."""

    @property
    def context(self) -> bytes:
        """Bytes that came beside the pages, once it has arrived."""

    def cancel(self) -> None:
        """Give the request up. Its pages may be used again when it is "released"."""

    def result(self) -> None:
        """Return if it has arrived.

        Raises:
            ReceiveFailed: It was released.
            TimeoutError: It is not over.
        """

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over; otherwise as `result`."""

    def add_done_callback(self, callback: Callable[[None], object]) -> None:
        """Call `callback(None)` on a thread of the engine when it is over."""

    def __await__(self) -> Generator[Any]: ...
