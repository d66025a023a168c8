"""The errors this package raises on purpose, named by meaning.

Everything below the RPC border raises one of these (or lets an engine's own exception pass);
`core/status.py` is the only place that turns them into a gRPC status.
"""

from __future__ import annotations


class ServicerError(Exception):
    """Base of all errors that carry a message fit for a client."""

    def __init__(self, message: str, *, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.trailers = trailers
        """Trailing metadata that goes out with the status, for example `smg-media-fault`."""


class InvalidArgument(ServicerError):
    """The caller's fault; `field` is the path in the request as the caller wrote it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class AlreadyExists(ServicerError):
    """A request with this id is in flight."""


class Aborted(ServicerError):
    """Somebody ended the request with Abort, and its answer has no words for that."""


class NotFound(ServicerError):
    """The thing named in the request is not here."""


class FailedPrecondition(ServicerError):
    """The request is fine but this server's state or configuration cannot serve it."""


class Exhausted(ServicerError):
    """The caller should slow down or ask for less."""


class Unavailable(ServicerError):
    """Not now and not here: loading, draining, or gone. A router fails over."""


class EngineDead(Unavailable):
    """The engine is gone for good; readiness and liveness go down with it."""


class OutOfRange(ServicerError):
    """A cursor that cannot be continued; told before the first message, or nobody resyncs."""


class DataLoss(ServicerError):
    """Something a stream should have told is gone; its reader has to begin anew."""


class DeadlineExceeded(ServicerError):
    """The engine did not answer in the time it was given."""


class Internal(ServicerError):
    """A fault of this server or its engine, with a message that may be shown."""


class Unsupported(ServicerError):
    """The engine behind this server has no such feature."""

    def __init__(self, engine: str, feature: str) -> None:
        super().__init__(f"{engine} does not support {feature}")
        self.engine = engine
        self.feature = feature


class ConfigError(Exception):
    """A setting that cannot work. The message names the flag or variable; the exit code is 2."""
