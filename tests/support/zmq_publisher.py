"""A KV-event publisher on real sockets, as engines have one, with knobs for what may go wrong."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import zmq

END = b"\xff" * 8


class ZmqPublisher:
    """PUB and, with `replay`, a ROUTER that answers from what is kept.

    :param bind: as engines do for a wildcard; else PUB connects to `endpoint`.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:0",
        *,
        bind: bool = True,
        replay: bool = True,
        replay_endpoint: str = "tcp://127.0.0.1:0",
        keep: int = 10_000,
        topic: bytes = b"",
        answers: bool = True,
        legacy_frames: bool = False,
    ) -> None:
        self._context = zmq.Context()
        self._topic = topic
        self._legacy = legacy_frames
        self.sequence = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.requests: list[int] = []
        self.answers = answers
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.sndhwm = 0
        if bind:
            self._pub.bind(endpoint)
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        else:
            self._pub.connect(endpoint)
            self.endpoint = endpoint
        self.replay_endpoint: str | None = None
        self._stop = False
        self._thread: threading.Thread | None = None
        if replay:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.linger = 0
            self._router.sndhwm = 0
            self._router.bind(replay_endpoint)
            self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def publish(self, *payloads: bytes, heard: bool = True, live: bytes | None = None) -> None:
        """Number and keep each payload; `heard=False` loses it on the way, `live` spoils it."""
        for payload in payloads:
            number = self.sequence.to_bytes(8, "big")
            self.kept.append((self.sequence, payload))
            self.sequence += 1
            if heard:
                self._pub.send_multipart([self._topic, number, live or payload])

    def send_frames(self, frames: Sequence[bytes]) -> None:
        self._pub.send_multipart(frames)

    def _serve(self) -> None:
        while not self._stop:
            if not self._router.poll(20):
                continue
            client, _, number = self._router.recv_multipart()
            start = int.from_bytes(number, "big")
            self.requests.append(start)
            if not self.answers:
                continue
            topic = [] if self._legacy else [self._topic]
            for sequence, payload in tuple(self.kept):
                if sequence >= start:
                    number = sequence.to_bytes(8, "big")
                    self._router.send_multipart([client, b"", *topic, number, payload])
            self._router.send_multipart([client, b"", *topic, END, b""][: 4 + len(topic)])

    def close(self) -> None:
        """May come twice."""
        if self._stop:
            return
        self._stop = True
        if self._thread is not None:
            self._thread.join(5)
            self._router.close(0)
        self._pub.close(0)
        self._context.term()
