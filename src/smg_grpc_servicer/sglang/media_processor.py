"""SGLang's own processor of a model's media, in this process.

Models with positions in three dimensions (M-RoPE) need them beside the media. The scheduler would
work them out itself, but from a prompt whose media tokens it has replaced already, so that they are
those of a text; and it ends over a request without any when its processor could not be loaded
(0.5.20 to 0.5.23). So they are told with the request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from smg_grpc_servicer.core.errors import InvalidArgument

log = logging.getLogger(__name__)


def load(server_args: Any, config: Any, model_config: Any) -> Any:
    """After SGLang's `publish`; None for a text model, and where it cannot be loaded."""
    if not model_config.is_multimodal or config.skip_tokenizer_init:
        return None
    from sglang.srt.managers.multimodal_processor import get_mm_processor, import_processors
    from sglang.srt.utils.hf_transformers_utils import get_processor

    try:
        import_processors("sglang.srt.multimodal.processors")
        files = get_processor(
            config.tokenizer_path or config.model_path,
            tokenizer_mode=config.tokenizer_mode,
            trust_remote_code=config.trust_remote_code,
            revision=config.revision,
            tokenizer_backend=config.tokenizer_backend,
        )
        return get_mm_processor(
            model_config.hf_config, server_args, files, "default", skip_mm_pool=True
        )
    except Exception as error:
        log.warning("SGLang's processor of this model's media cannot be loaded: %s", error)
        return None


def positions(processor: Any, prompt: Sequence[int], items: Sequence[Any]) -> dict[str, Any]:
    """Fields of a `MultimodalProcessorOutput`; empty for a model whose positions are plain.

    :raises InvalidArgument: the prompt and the media do not fit each other.
    """
    try:
        found, delta = processor.compute_mrope_positions(list(prompt), list(items))
    except Exception as error:
        raise InvalidArgument(
            "mm_inputs", f"the prompt and the media do not fit each other: {error}"
        ) from error
    if found is None:
        return {}
    return {"mrope_positions": found, "mrope_position_delta": delta}
