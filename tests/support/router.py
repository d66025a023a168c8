"""The real router in front of servicers: started, asked over HTTP, ended. Times are seconds."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from tests.support.servers import Process

PYTHON = "SMG_ROUTER_PYTHON"
HTTP_SECONDS = 40


@dataclass(frozen=True)
class Answer:
    """An HTTP answer that was read to its end."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The data of a server-sent stream, without the closing [DONE]."""
        return [json.loads(data) for data in _data(self.text) if data != "[DONE]"]

    @property
    def done(self) -> bool:
        return list(_data(self.text))[-1:] == ["[DONE]"]


def _data(text: str) -> Iterator[str]:
    return (line[6:] for line in text.splitlines() if line.startswith("data: "))


class Router(Process):
    """A router; `port` answers the OpenAI API."""

    port = 0

    async def post(self, path: str, **body: Any) -> Answer:
        return await asyncio.to_thread(self._ask, "POST", path, body)

    async def get(self, path: str) -> Answer:
        return await asyncio.to_thread(self._ask, "GET", path, None)

    async def begin(self, path: str, **body: Any) -> Streaming:
        """A streamed answer whose first event has come."""
        streaming = Streaming(self.port)
        await asyncio.to_thread(streaming.begin, path, json.dumps({**body, "stream": True}))
        return streaming

    async def ask_and_leave(
        self, path: str, until: Callable[[], Awaitable[object]], **body: Any
    ) -> None:
        """Ask for an answer that comes whole, and hang up before it does."""
        with closing(_connection(self.port)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            await until()

    async def models(self) -> list[str]:
        answer = await self.get("/v1/models")
        return [m["id"] for m in answer.json["data"]] if answer.status == 200 else []

    async def serves(self, model: str, seconds: float = 40.0) -> None:
        """Wait until the model is listed and answers: the tokenizer comes after the listing."""
        await self._answers("/v1/completions", seconds, model=model, prompt="a", max_tokens=1)

    async def embeds(self, model: str, seconds: float = 40.0) -> None:
        """The same of a model that embeds."""
        await self._answers("/v1/embeddings", seconds, model=model, input="a")

    async def _answers(self, path: str, seconds: float, **body: Any) -> None:
        end = monotonic() + seconds
        while True:
            try:
                answer = await self.post(path, **body)
                if answer.status == 200:
                    return
                seen = f"{answer.status} {answer.text}"
            except (OSError, http.client.HTTPException) as error:
                seen = repr(error)
            assert self.running, f"the router has ended:\n{self.log}"
            assert monotonic() < end, f"{body['model']} is not served ({seen}):\n{self.log}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        return ask(self.port, method, path, body)


def ask(port: int, method: str, path: str, body: dict[str, Any] | None) -> Answer:
    """One question to an HTTP server on this machine; blocks until its answer is whole."""
    with closing(_connection(port)) as connection:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return Answer(response.status, response.read().decode())


class Streaming:
    """An answer that is still coming in."""

    def __init__(self, port: int) -> None:
        self._connection = _connection(port)
        self._text = ""

    def begin(self, path: str, body: str) -> None:
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        while "data: " not in self._text and (line := self._response.readline()):
            self._text += line.decode()

    async def rest(self) -> Answer:
        """Read it to its end."""
        try:
            self._text += (await asyncio.to_thread(self._response.read)).decode()
            return Answer(self._response.status, self._text)
        finally:
            self.leave()

    def leave(self) -> None:
        """Hang up."""
        # The response holds the socket open until it is closed as well.
        self._response.close()
        self._connection.close()


def _connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=HTTP_SECONDS)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on right now; the router cannot choose one itself."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


@asynccontextmanager
async def routing(cwd: Path, *workers: str, options: tuple[str, ...] = ()) -> AsyncIterator[Router]:
    """A router over workers at `host:port`, not waited for; it runs in `cwd`."""
    python = os.environ.get(PYTHON)
    assert python, f"{PYTHON} must name the Python of a venv with the router: pip install smg"
    port, prometheus = free_ports(2)
    router = Router(
        [
            python, "-m", "smg.launch_router",
            "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus),
            "--worker-urls", *(f"grpc://{worker}" for worker in workers), *options,
        ],
        {"PYTHONPATH": "", "NO_COLOR": "1"},
        cwd,
    )  # fmt: skip
    router.port = port
    try:
        yield router
    finally:
        await asyncio.to_thread(router.end)
