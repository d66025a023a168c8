"""SGLang and torch are imported here once, where their own warnings are nobody's error."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.tokenizer_control_mixin
    import sglang.srt.utils.network  # noqa: F401
