"""vLLM and torch are imported here once, where their own warnings are nobody's error."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.async_llm  # noqa: F401
