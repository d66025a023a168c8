"""Media that count patches in a grid: what fits none of grid, pixels and prompt is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.payloads import Media, Tensor
from smg_grpc_servicer.sglang.media_grid import GridRule, check_sizes

TOKEN, ROW = 9, 2 * 3 * 4 * 4
RULE = GridRule(2, ROW, (("image", TOKEN), ("video", 8)))
PROMPT = [1, 7, TOKEN, TOKEN, 7, 2]


def cells(*values: int, rows: int | None = None, dtype: str = "int64") -> Tensor:
    code = "q" if dtype == "int64" else "i"
    shape = (len(values) // 3 if rows is None else rows, 3)
    return Tensor(struct.pack(f"<{len(values)}{code}", *values), shape, dtype)


def media(grid: Tensor | None = None, **changed: Any) -> Media:
    made = Media(
        Tensor(b"", (8, ROW), "float32"),
        {"image_grid_thw": grid or cells(1, 2, 4)},
        ((2, 2),),
        TOKEN,
    )
    return replace(made, **changed)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_what_fits_is_let_through(dtype: str) -> None:
    RULE.check(media(cells(1, 2, 4, dtype=dtype)), PROMPT, {})
    RULE.check(media(cells(1, 2, 2, 1, 2, 2), placeholders=((2, 1), (3, 1))), PROMPT, {})


@pytest.mark.parametrize(
    ("wrong", "prompt", "field"),
    [
        (media(tensors={}), PROMPT, "image_grid_thw"),
        (media(cells(1, 2, 4, dtype="int32", rows=1)), [1, 7, 2, 2, 7, 2], "mm_placeholders"),
        (media(Tensor(b"\0" * 12, (1, 3), "float32")), PROMPT, "image_grid_thw"),
        (media(Tensor(b"\0" * 16, (2,), "int64")), PROMPT, "image_grid_thw"),
        (media(Tensor(b"", (0, 3), "int64")), PROMPT, "image_grid_thw"),
        (media(cells(1, 3, 4)), PROMPT, "image_grid_thw"),
        (media(cells(1, -2, -4)), PROMPT, "image_grid_thw"),
        (media(cells(0, 2, 4)), PROMPT, "image_grid_thw"),
        (media(cells(1, 4, 4)), PROMPT, "pixel_values"),
        (media(pixels=Tensor(b"", (8 * ROW,), "float32")), PROMPT, "pixel_values"),
        (media(pixels=Tensor(b"", (8, 7), "float32")), PROMPT, "pixel_values"),
        (media(placeholders=((2, 1),)), PROMPT, "mm_placeholders"),
        (media(placeholders=((1, 2),)), PROMPT, "mm_placeholders"),
        (media(), [*PROMPT, TOKEN], "mm_placeholders"),
        (
            media(tensors={"image_grid_thw": cells(1, 2, 4), "video_grid_thw": cells(1, 2, 2)}),
            PROMPT,
            "model_specific_tensors",
        ),
    ],
)
def test_what_does_not_is_refused_by_name(wrong: Media, prompt: list[int], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        RULE.check(wrong, prompt, {})


def test_more_media_than_the_operator_allows_are_refused() -> None:
    """SGLang checks `--limit-mm-data-per-request` in its front end, which is not here."""
    two = media(cells(1, 2, 2, 1, 2, 2))
    RULE.check(two, PROMPT, {"image": 2, "video": 0})
    with pytest.raises(InvalidArgument, match="2 are more than --limit-mm-data-per-request"):
        RULE.check(two, PROMPT, {"image": 1})


@pytest.mark.parametrize("cell", [2**62, 0, -1])
def test_a_grid_that_no_rule_knows_is_no_larger_than_its_media(cell: int) -> None:
    """Positions are made of it, as many as it says: they would fill the memory."""
    check_sizes(media(pixels=Tensor(bytes(8), (8,), "uint8")))
    with pytest.raises(InvalidArgument, match="image_grid_thw"):
        check_sizes(media(cells(1, cell, 4), pixels=Tensor(bytes(8), (8,), "uint8")))


def config(vision: dict[str, int] | None, *, mrope: bool = True) -> Any:
    hf: dict[str, Any] = {"image_token_id": TOKEN}
    if vision is not None:
        hf["vision_config"] = SimpleNamespace(to_dict=lambda: vision)
    return SimpleNamespace(
        is_multimodal=True, model_is_mrope=mrope, hf_config=SimpleNamespace(**hf)
    )


def test_the_rule_is_read_off_the_model() -> None:
    vision = {"spatial_merge_size": 2, "patch_size": 4, "temporal_patch_size": 2, "in_channels": 3}
    assert GridRule.of(config(vision)) == GridRule(2, ROW, (("image", TOKEN),))
    assert GridRule.of(config({**vision, "in_channels": 0, "in_chans": 1})) == GridRule(
        2, 32, (("image", TOKEN),)
    )


@pytest.mark.parametrize(
    "found", [config(None), config({"patch_size": 4}), config({}, mrope=False)]
)
def test_other_models_have_none(found: Any) -> None:
    assert GridRule.of(found) is None
