"""SGLang on a CPU, also in this process: its stand-ins come before anything of it is imported."""

from __future__ import annotations

import os

import tests.support.sglang_cpu.sitecustomize  # noqa: F401

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
