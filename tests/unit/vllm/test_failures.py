"""vLLM's exceptions by name: classes of the same names and bases, without vLLM."""

from __future__ import annotations

import json
from http import HTTPStatus
from types import FunctionType
from typing import Any

import pytest

from smg_grpc_servicer.core import errors
from smg_grpc_servicer.core.status import details
from smg_grpc_servicer.core.types import Constraint, GenerateSpec, Sampling
from smg_grpc_servicer.vllm.failures import located, translate


class VLLMError(Exception):
    pass


class VLLMClientError(VLLMError):
    pass


class VLLMValidationError(VLLMClientError):
    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __str__(self) -> str:
        return f"{self.args[0]} (parameter={self.parameter})"


class VLLMNotFoundError(VLLMClientError):
    pass


class GracefulHTTPError(VLLMError):
    def __init__(self, http_status: HTTPStatus) -> None:
        super().__init__("words")
        self.http_status = http_status


class GenerationError(VLLMError):
    status_code = HTTPStatus.INTERNAL_SERVER_ERROR


class RetryableRequestError(GenerationError):
    status_code = HTTPStatus.SERVICE_UNAVAILABLE


class EngineGenerateError(VLLMError):
    pass


class EngineDeadError(VLLMError):
    pass


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (EngineDeadError("see above"), errors.EngineDead, "the engine is gone"),
        (VLLMValidationError("too big", "logprobs"), errors.InvalidArgument,
         "sampling_params.logprobs: too big"),
        (VLLMValidationError("n must be 1 when greedy"), errors.InvalidArgument,
         "sampling_params.n: n must be 1 when greedy (parameter=None)"),
        (VLLMClientError("no such thing"), errors.InvalidArgument, "request: no such thing"),
        (VLLMNotFoundError("no adapter"), errors.NotFound, "no adapter"),
        (RetryableRequestError("again"), errors.Unavailable, "again"),
        (GenerationError("broken"), errors.Internal, "broken"),
        (EngineGenerateError(), errors.Internal, "the engine failed"),
        (caused(EngineGenerateError(), VLLMNotFoundError("gone")), errors.NotFound, "gone"),
        (caused(EngineGenerateError(), EngineDeadError()), errors.EngineDead, "the engine is gone"),
        (errors.Exhausted("ours"), errors.Exhausted, "ours"),
    ],
)  # fmt: skip
def test_each_class_has_its_meaning(error: Exception, kind: type[Exception], words: str) -> None:
    """V7 and O2: a dead engine is UNAVAILABLE; weak points 1 to 3: words are never empty."""
    known = translate(error)
    assert type(known) is kind
    assert str(known).startswith(words)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (HTTPStatus.BAD_REQUEST, errors.InvalidArgument),
        (HTTPStatus.UNPROCESSABLE_ENTITY, errors.InvalidArgument),
        (HTTPStatus.NOT_FOUND, errors.NotFound),
        (HTTPStatus.REQUEST_TIMEOUT, errors.DeadlineExceeded),
        (HTTPStatus.CONFLICT, errors.FailedPrecondition),
        (HTTPStatus.TOO_MANY_REQUESTS, errors.Exhausted),
        (HTTPStatus.INTERNAL_SERVER_ERROR, errors.Internal),
        (HTTPStatus.SERVICE_UNAVAILABLE, errors.Unavailable),
        (HTTPStatus.GATEWAY_TIMEOUT, errors.DeadlineExceeded),
    ],
)
def test_an_http_status_of_vllms_is_ours(status: HTTPStatus, kind: type[Exception]) -> None:
    assert type(translate(GracefulHTTPError(status))) is kind


def raised_in(module: str) -> ValueError:
    """A ValueError whose innermost frame is in that module."""

    def fail() -> None:
        raise ValueError("odd")

    moved: Any = FunctionType(fail.__code__, {"__name__": module, "__builtins__": __builtins__})
    try:
        moved()
    except ValueError as error:
        return error
    raise AssertionError


def test_a_value_error_is_the_callers_only_from_vllms_checks() -> None:
    """Weak point 4: a bug inside must not be blamed on the caller."""
    assert type(translate(raised_in("vllm.sampling_params"))) is errors.InvalidArgument
    for inside in ("numpy", "vllm.v1.engine.output_processor"):
        bug = raised_in(inside)
        assert translate(bug) is bug
    assert details(translate(ValueError())) == "ValueError"


def test_what_a_check_of_vllms_calls_speaks_for_it() -> None:
    """A schema with a number of 5,000 digits fails in Python's own JSON, below vLLM's check."""

    def check() -> None:
        json.loads("9" * 5000)

    for module, kind in (
        ("vllm.v1.structured_output.backend_xgrammar", errors.InvalidArgument),
        ("vllm.v1.serial_utils", ValueError),
    ):
        names = {"__name__": module, "__builtins__": __builtins__, "json": json}
        moved: Any = FunctionType(check.__code__, names)
        with pytest.raises(ValueError, match="4300") as raised:
            moved()
        assert type(translate(raised.value)) is kind


def test_a_wrapped_bug_tells_the_innermost_cause() -> None:
    """Weak point 1: EngineGenerateError itself says nothing."""
    known = translate(caused(EngineGenerateError(), KeyError("pixel_values")))
    assert details(known) == "KeyError: 'pixel_values'"


def test_a_constraint_is_named_when_vllm_names_nothing() -> None:
    spec = GenerateSpec("r", sampling=Sampling(constraint=Constraint("regex", "(")))
    known = located(translate(VLLMClientError("Grammar error")), spec)
    assert str(known) == "sampling_params.regex: Grammar error"
    assert str(located(errors.Internal("x"), spec)) == "x"
    assert str(located(translate(VLLMClientError("x")), GenerateSpec("r"))) == "request: x"
