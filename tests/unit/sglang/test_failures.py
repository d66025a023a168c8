"""What a scheduler's abort means."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from smg_grpc_servicer.core import errors
from smg_grpc_servicer.core.types import Constraint
from smg_grpc_servicer.sglang.failures import from_abort


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidArgument),
        (422, errors.InvalidArgument),
        (404, errors.NotFound),
        (408, errors.DeadlineExceeded),
        (429, errors.Exhausted),
        (500, errors.Internal),
        (HTTPStatus.SERVICE_UNAVAILABLE, errors.Unavailable),
        (504, errors.DeadlineExceeded),
        (599, errors.Internal),
    ],
)
def test_a_status_is_an_error(status: int, kind: type[errors.ServicerError]) -> None:
    error = from_abort({"message": "why", "status_code": status}, None)
    assert type(error) is kind
    assert error.message.endswith("why")


@pytest.mark.parametrize("reason", [{}, {"message": "Aborted", "status_code": None}])
def test_without_a_status_it_is_a_plain_end(reason: Any) -> None:
    assert from_abort(reason, None) is None


def test_the_message_is_never_empty() -> None:
    error = from_abort({"message": " ", "status_code": 500}, None)
    assert str(error) == "the scheduler aborted the request"


@pytest.mark.parametrize(
    ("words", "constraint", "field"),
    [
        ("Input length (9) exceeds", None, "tokenized.input_ids"),
        ("Failed to compile", Constraint("grammar", "x"), "sampling_params.ebnf_grammar"),
        ("Failed to compile", Constraint("regex", "x"), "sampling_params.regex"),
        ("something", None, "request"),
    ],
)
def test_the_field_is_named_where_it_can_be_told(
    words: str, constraint: Constraint | None, field: str
) -> None:
    error = from_abort({"message": words, "status_code": 400}, constraint)
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == field


def test_a_failed_constraint_goes_before_its_status() -> None:
    reason = {"message": "Grammar accept_token failed: no", "status_code": 500}
    error = from_abort(reason, None)
    assert isinstance(error, errors.FailedPrecondition)
    assert error.trailers == (("smg-constraint-failed", "engine"),)
