"""SGLang's own offline answers to images: `python -m tests.support.sglang_media_oracle OUT MODEL`.

The JSON has, for each image, what a gateway would send of it (the prompt's `ids`, `pixels` in
base64 with their `shape`, the `grid`, where its tokens stand), the image itself (`png` in base64),
and what `Engine.generate` made of that: `answer`.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.support.sglang_oracle import offline

SIZES = ((64, 64), (96, 64), (128, 160))
TEXT = "<|im_start|>user\nlook <|vision_start|><|image_pad|><|vision_end|> here<|im_end|>\n"
TOKENS = 8


def picture(at: int) -> Any:
    """Noise of a fixed seed."""
    width, height = SIZES[at]
    return import_module("PIL.Image").frombytes(
        "RGB", (width, height), random.Random(at).randbytes(width * height * 3)
    )


def sent(processor: Any, config: dict[str, Any], image: Any) -> dict[str, Any]:
    found = processor(text=[TEXT], images=[image], return_tensors="pt")
    pixels = found["pixel_values"].float().contiguous()
    ids = found["input_ids"][0].tolist()
    token = config["image_token_id"]
    file = BytesIO()
    image.save(file, "PNG")
    return {
        "ids": ids,
        "pixels": base64.b64encode(pixels.numpy().tobytes()).decode(),
        "shape": list(pixels.shape),
        "grid": found["image_grid_thw"].tolist(),
        "place": [ids.index(token), ids.count(token)],
        "token": token,
        "png": base64.b64encode(file.getvalue()).decode(),
    }


def main() -> None:
    out, model = sys.argv[1:]
    from transformers import AutoProcessor

    images = [picture(at) for at in range(len(SIZES))]
    config = json.loads((Path(model) / "config.json").read_text())
    processor = AutoProcessor.from_pretrained(model)
    found = [sent(processor, config, image) for image in images]
    engine = offline(model)
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    try:
        for image, each in zip(images, found, strict=True):
            answer = engine.generate(prompt=TEXT, image_data=[image], sampling_params=sampling)
            each["answer"] = answer["output_ids"]
    finally:
        engine.shutdown()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
