"""`python -m putget_transfer.adapters.router`: one address for prefill and decode servers of vLLM.

Each completion goes to a prefill and a decode server, in either order. A prompt that fails on one prefill server is
tried on the next. It needs starlette, httpx and uvicorn, which vLLM brings along.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions")
ORDERS = ("decode", "prefill")
REST_S = 5.0
"""How long a server that did not answer is left alone, if there are others."""


class Failed(Exception):
    """A request has failed at a server; another one may do better."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(content.decode(errors="replace"))
        self.status, self.content = status, content


class Answer:
    """A server's answer, whose content is still to come."""

    def __init__(self, response: Any) -> None:
        self.status, self.kind = response.status_code, response.headers.get("content-type", "application/json")
        self.response, self.chunks, self.first = response, response.aiter_raw(), b""

    async def begin(self) -> None:
        """Wait for a stream's first event.

        Raises:
            Failed: It is an error of the server.
        """
        self.first = await anext(self.chunks, b"")
        if not self.first.startswith(b'data: {"error"'):
            return
        content = self.first.removeprefix(b"data: ").split(b"\n", 1)[0]
        with contextlib.suppress(ValueError, TypeError, KeyError):
            status = int(json.loads(content)["error"]["code"])
            if status >= 500:
                raise Failed(status, content)

    async def content(self) -> AsyncIterator[bytes]:
        """Hand the content on as it comes."""
        yield self.first
        async for chunk in self.chunks:
            yield chunk


class Server:
    """A server and how busy it is."""

    def __init__(self, url: str) -> None:
        import httpx

        self.url, self.under_way, self.rests_until = url, 0, 0.0
        self.sources: list[str] | None = None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=5.0), limits=limits)

    async def send(self, path: str, body: dict[str, Any]) -> Answer:
        """Send a request; return its answer. A stream has begun: another server could not take its place any more.

        Raises:
            Failed: There is none, or it is an error of the server.
        """
        import httpx

        self.under_way += 1
        try:
            response = await self.client.send(self.client.build_request("POST", path, json=body), stream=True)
            try:
                if response.status_code >= 500:
                    raise Failed(response.status_code, await response.aread())
                answer = Answer(response)
                if body.get("stream"):
                    await answer.begin()
                return answer
            except BaseException:
                await response.aclose()
                raise
        except httpx.TransportError as error:
            self.rests_until, self.sources = asyncio.get_running_loop().time() + REST_S, None
            raise Failed(502, f"{self.url}: {type(error).__name__} {error}".encode()) from error
        finally:
            self.under_way -= 1

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request; return what came back.

        Raises:
            Failed: There is nothing, or it is an error.
        """
        answer = await self.send(path, body)
        content = await answer.response.aread()
        if answer.status != 200:
            raise Failed(answer.status, content)
        return dict(json.loads(content))


class Router:
    """Chooses servers and keeps the order."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], order: str = "decode") -> None:
        if not prefill or not decode or order not in ORDERS:
            raise ValueError(f"{len(prefill)} prefill and {len(decode)} decode servers, order {order!r} came")
        self.prefill, self.decode = [Server(url) for url in prefill], [Server(url) for url in decode]
        self.order, self.turn = order, 0

    def pick(self, servers: list[Server]) -> Server:
        """Return the one with the least to do, in turn among equals; those that rest come last."""
        now = asyncio.get_running_loop().time()
        self.turn += 1
        turned = servers[self.turn % len(servers) :] + servers[: self.turn % len(servers)]
        return min(turned, key=lambda server: (server.rests_until > now, server.under_way))

    async def sources_of(self, server: Server, model: Any) -> list[str]:
        """Return a prefill server's ranks."""
        if server.sources is None:
            body = {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"putget_describe": True}}
            answer = await server.ask(PATHS[0], body)
            server.sources = list(answer["kv_transfer_params"]["putget_sources"])
        return server.sources

    async def complete(self, path: str, body: dict[str, Any]) -> tuple[Answer, asyncio.Task[Any] | None]:
        """Return the decode server's answer, and the prefill that is still under way.

        Raises:
            Failed: All prefill servers were tried.
        """
        for left in reversed(range(len(self.prefill) + 1)):
            prefill = self.pick(self.prefill)
            try:
                if self.order == "prefill":
                    return await self.prefill_first(prefill, path, body), None
                return await self.decode_first(prefill, path, body)
            except Failed as error:
                prefill.sources = None
                if not left or error.status < 500:
                    raise
        raise AssertionError("unreachable")

    @staticmethod
    def prompt_only(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """Return the request for a prefill server."""
        left = {
            name: value
            for name, value in body.items()
            if name not in ("max_completion_tokens", "min_tokens", "stream", "stream_options", "n")
        }
        return {**left, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, **params}}

    async def prefill_first(self, prefill: Server, path: str, body: dict[str, Any]) -> Answer:
        """Decode when the prompt is computed."""
        told = await prefill.ask(path, self.prompt_only(body, {"transfer_id": uuid.uuid4().hex}))
        params = told.get("kv_transfer_params")
        return await self.pick(self.decode).send(path, {**body, "kv_transfer_params": params})

    async def decode_first(
        self, prefill: Server, path: str, body: dict[str, Any]
    ) -> tuple[Answer, asyncio.Task[Any] | None]:
        """Let the decode server wait for each layer of the prompt while it is computed."""
        params = {"transfer_id": uuid.uuid4().hex}
        sources = await self.sources_of(prefill, body.get("model"))
        asked = {"do_remote_prefill": True, "putget_sources": sources, **params}
        decodes = asyncio.ensure_future(self.pick(self.decode).send(path, {**body, "kv_transfer_params": asked}))
        prefills = asyncio.ensure_future(prefill.ask(path, self.prompt_only(body, params)))
        try:
            await asyncio.wait([decodes, prefills], return_when=asyncio.FIRST_COMPLETED)
            if prefills.done():
                # If it has failed the decode server would wait in vain.
                prefills.result()
            return await decodes, prefills
        except BaseException:
            for task in (decodes, prefills):
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
            raise


async def content_of(answer: Answer, prefill: asyncio.Task[Any] | None) -> AsyncIterator[bytes]:
    """Hand a decode server's content on as it comes. The decode server has the prompt, so the prefill may fail now."""
    try:
        async for chunk in answer.content():
            yield chunk
    finally:
        if prefill is not None:
            prefill.cancel()
            with contextlib.suppress(BaseException):
                await prefill
        await answer.response.aclose()


async def unless_gone(request: Any, work: Any) -> Any:
    """Return what `work` comes to; it is cancelled when the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    if not task.done():
        task.cancel()
    return await task


def application(router: Router) -> Any:
    """Return the application for a server of ASGI."""
    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def complete(request: Any) -> Any:
        body = await request.json()
        try:
            answer, prefill = await unless_gone(request, router.complete(request.url.path, body))
        except Failed as error:
            return Response(error.content, error.status, media_type="application/json")
        return StreamingResponse(content_of(answer, prefill), answer.status, headers={"content-type": answer.kind})

    async def health(request: Any) -> Any:
        return Response()

    return Starlette(routes=[Route("/health", health), *(Route(path, complete, methods=["POST"]) for path in PATHS)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process is ended."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m putget_transfer.adapters.router", description=__doc__)
    parser.add_argument("--prefill", action="append", required=True, help="a prefill server's address; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="a decode server's address; may be repeated")
    parser.add_argument("--order", choices=ORDERS, default="decode", help="who is asked first (default decode)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="the port to listen at (default 8000)")
    given = parser.parse_args(arguments)
    router = Router(given.prefill, given.decode, given.order)
    uvicorn.run(application(router), host=given.host, port=given.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
