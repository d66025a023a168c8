"""Control calls that ended the scheduler once cost their caller a status and nobody anything."""

from __future__ import annotations

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from tests.support.client import Client
from tests.support.sglang_cases import BAD_PROFILES, prompt


async def test_a_profile_that_would_end_the_scheduler(client: Client) -> None:
    """Each is refused by its field, and the batches that come after it are computed."""
    for field, fields in BAD_PROFILES.values():
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: ") as refused:
            await client.stub.StartProfile(common_pb2.StartProfileRequest(**fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(await client.ids(prompt(4, 81), max_tokens=2)) == 2
