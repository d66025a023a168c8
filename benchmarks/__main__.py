"""`python -m benchmarks`: every number of the README, in the README's form.

`SMG_PUBLISHED_PYTHON` names the interpreter of a venv with the published package and its MLX,
`SMG_PUBLISHED_FOLDER` a folder with that package alone, for the vLLM and SGLang it runs on here;
without them the columns beside ours stay empty. Arguments: the benchmarks to run, all when none is
given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = {
    "messages": ("What a streamed message costs the server", ("messages.py",)),
    "kv_events": ("KV events, from the publisher to two subscribers", ("kv_events.py",)),
    "mlx": ("MLX on a CPU, beside mlx-lm's BatchGenerator", ("mlx_engine.py",)),
    "vllm": (
        "vLLM's servicer, over a stub engine and over vLLM's own",
        ("vllm_servicer.py", "--real"),
    ),
    "sglang": ("SGLang's servicer, over a stub scheduler", ("sglang_servicer.py",)),
    "rust": ("vLLM's Python and Rust paths over one stub of an engine core", ("rust_path.py",)),
}

PUBLISHED = {
    "mlx": "SMG_PUBLISHED_PYTHON",
    "vllm": "SMG_PUBLISHED_FOLDER",
    "sglang": "SMG_PUBLISHED_FOLDER",
}
"""Where each finds the published package."""


def main() -> int:
    """Run them one after another; 1 when a target was missed."""
    chosen = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark is named {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
        return 2
    missed = []
    for name in chosen:
        title, command = BENCHMARKS[name]
        print(f"\n### {title}\n", flush=True)
        published = os.environ.get(PUBLISHED.get(name, ""))
        more = ["--published", published] if published else []
        script = str(Path(__file__).with_name(command[0]))
        if subprocess.call([sys.executable, script, *command[1:], *more]):
            missed.append(name)
    if missed:
        print(f"\nmissed a target: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
