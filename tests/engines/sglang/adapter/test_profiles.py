"""What of a profile reaches the scheduler, which ends over what its profiler cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from sglang.srt.managers import io_struct as io
from smg_grpc_proto.generated import common_pb2

from tests.support.sglang_cases import BAD_PROFILES
from tests.support.sglang_served import served_sglang

BAD = {name: fields for name, (_, fields) in BAD_PROFILES.items()}


@pytest.mark.parametrize("name", BAD_PROFILES)
async def test_a_profile_that_would_end_the_scheduler_is_refused(name: str) -> None:
    """INVALID_ARGUMENT naming the field, and the scheduler hears nothing of it."""
    field, fields = BAD_PROFILES[name]
    async with served_sglang() as server:
        call = server.stub.StartProfile(common_pb2.StartProfileRequest(**fields))
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: ") as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert server.scheduler.received == []


@pytest.mark.parametrize("fields", [*BAD.values(), {"num_steps": "x"}, {"activities": 7}])
async def test_sglang_s_sidecar_passes_nothing_on_that_would(fields: dict[str, Any]) -> None:
    """It hands over whatever JSON it was sent, and tells what stands in the answer."""
    async with served_sglang() as server:
        asked = io.ProfileReq(req_type=io.ProfileReqType.START_PROFILE, **fields)
        (answer,) = await server.manager.send_communicator_req(asked, "profile_communicator")
        assert (answer.success, bool(answer.message)) == (False, True)
        assert server.scheduler.received == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activities": ["CPU", "GPU"]},
        {"profile_by_stage": True, "num_steps": 1},
        {"start_step": 3, "num_steps": 2},
    ],
)
async def test_any_other_profile_is_sent(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into SGLang's own folder where none is named."""
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "made" / "for it"))
    async with served_sglang() as server:
        server.scheduler.answers = {
            io.ProfileReq: lambda r: io.ProfileReqOutput(success=True, message="Succeeded.")
        }
        answer = await server.stub.StartProfile(common_pb2.StartProfileRequest(**fields))
        assert answer.success
        (sent,) = server.scheduler.received
        assert sent.output_dir is None
