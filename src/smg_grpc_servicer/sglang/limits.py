"""What of a running SGLang a request is held against, read once; a plain value.

Who launches fills it (`Limits.of` reads SGLang's own records); the adapter only reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_servicer.core.payloads import Adapter
from smg_grpc_servicer.sglang.facts import media_items, num_ranks
from smg_grpc_servicer.sglang.media_grid import GridRule

_HIDDEN_STATES = ("off", "last", "full")


@dataclass(frozen=True, slots=True)
class Limits:
    """Unknown stays None: then nothing is refused for it."""

    ranks: int = 1
    """Data-parallel ranks a request can be pinned to."""
    max_prompt_tokens: int | None = None
    """The ready report's `max_req_input_len`: a prompt must be shorter."""
    truncates: bool = False
    """`--allow-auto-truncate`: a longer prompt is cut by the scheduler."""
    role: str = "null"
    """`--disaggregation-mode`: null, prefill or decode."""
    lora: bool = False
    """`--enable-lora`."""
    startup_adapters: tuple[Adapter, ...] = ()
    """`--lora-paths`."""
    max_adapters: int | None = None
    """`--max-loaded-loras`."""
    logit_processors: bool = False
    """`--enable-custom-logit-processor`."""
    hidden_states: str = "off"
    """`--return-hidden-states-mode`: off, last or full."""
    prefix_cache: bool = True
    """Not `--disable-radix-cache`."""
    tokenizer: bool = True
    """Not `--skip-tokenizer-init`: stop strings and min_new_tokens work."""
    hidden_size: int | None = None
    """Width of one input embedding."""
    media: bool = False
    """The model takes images."""
    language_only: bool = False
    """`--language-only`: encoders of their own see the images."""
    media_items: Mapping[str, int] = field(default_factory=dict)
    """`--limit-mm-data-per-request`: most media of a request, by kind."""
    grid: GridRule | None = None
    """What it says of their patches, if it counts them in a grid."""
    drafts_per_step: int | None = None
    """Draft tokens that one step of speculative decoding proposes."""
    traced: bool = False
    """`--enable-trace`."""

    @classmethod
    def of(cls, args: Any, model_config: Any, ready: Mapping[str, Any]) -> Limits:
        """From SGLang's resolved arguments (`resolved_view`), its `ModelConfig` and the first
        rank's ready report.
        """
        drafts = args.speculative_num_draft_tokens if args.speculative_algorithm else None
        mode = args.return_hidden_states_mode
        return cls(
            ranks=num_ranks(args),
            max_prompt_tokens=ready.get("max_req_input_len"),
            truncates=bool(args.allow_auto_truncate),
            role=args.disaggregation_mode,
            lora=bool(args.enable_lora),
            startup_adapters=tuple(
                Adapter(ref.lora_id, ref.lora_name, ref.lora_path, bool(ref.pinned))
                for ref in args.lora_paths or ()
            ),
            max_adapters=args.max_loaded_loras,
            logit_processors=bool(args.enable_custom_logit_processor),
            hidden_states=mode if mode in _HIDDEN_STATES else "off",
            prefix_cache=not args.disable_radix_cache,
            tokenizer=not args.skip_tokenizer_init,
            hidden_size=model_config.hidden_size,
            media=bool(model_config.is_multimodal),
            language_only=bool(args.language_only),
            media_items=media_items(args.limit_mm_data_per_request),
            grid=GridRule.of(model_config),
            drafts_per_step=drafts - 1 if drafts else None,
            traced=bool(args.enable_trace),
        )
