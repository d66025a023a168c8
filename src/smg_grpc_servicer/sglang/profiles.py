"""What of a StartProfile SGLang's profiler can do.

Its schedulers check nothing and end over what does not work, some of it late: a folder when the
trace is written, a stage when the next batch comes. So all of it is looked at before they hear of
it (0.5.20 to 0.5.23). The first node's ranks write on this machine, as this user.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.status import details
from smg_grpc_servicer.core.types import ProfileSpec

_ALWAYS = ("CPU", "GPU", "XPU")
_CUDA = ("MEM", "CUDA_PROFILER")
_ROCM = "RPD"
_SGLANGS = "/tmp"  # noqa: S108 - where SGLang writes when nobody says where
_ROCM_MODULES = ("rpdTracerControl", "rocpd")


def refusal(request: Any) -> str | None:
    """What is wrong with SGLang's own ProfileReq: its sidecar passes on whatever it is sent."""
    if request.req_type.name != "START_PROFILE":
        return None
    try:
        check(request)
    except Exception as error:
        return details(error)
    return None


def check(spec: ProfileSpec | Any) -> None:
    """Also of a ProfileReq. Writes a file into the folder: off the loop.

    :raises InvalidArgument: naming the field.
    """
    for name, value in (("start_step", spec.start_step), ("num_steps", spec.num_steps)):
        if value is not None and value < 0:
            raise InvalidArgument(name, f"must not be negative, got {value}")
    if spec.profile_by_stage and not spec.num_steps:
        raise InvalidArgument("num_steps", "must be at least 1 with profile_by_stage")
    for activity in spec.activities or ():
        _check_activity(activity)
    _check_folder(spec.output_dir)


def _check_activity(name: str) -> None:
    import torch
    from sglang.srt.platforms import current_platform

    known = [*_ALWAYS, *_CUDA, _ROCM]
    if current_platform.is_out_of_tree():
        known.append(current_platform.get_torch_profiler_activity_str())
    if name not in known:
        raise InvalidArgument("activities", f"must be of {', '.join(known)}, got {name!r}")
    if name in _CUDA and not torch.cuda.is_available():
        raise InvalidArgument("activities", f"{name} needs CUDA, which is not available here")
    if name == _ROCM and not all(find_spec(module) for module in _ROCM_MODULES):
        raise InvalidArgument(
            "activities", f"{name} needs {' and '.join(_ROCM_MODULES)}, which are not installed"
        )


def _check_folder(asked: str | None) -> None:
    """Made if it is not there, as SGLang would make it when it writes."""
    folder = os.environ.get("SGLANG_TORCH_PROFILER_DIR", _SGLANGS) if asked is None else asked
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidArgument("output_dir", f"{folder!r} cannot be written to: {error}") from None
