"""`python -m smg_grpc_servicer`: the version, and the commands there are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from smg_grpc_servicer import __version__

COMMANDS = (
    ("python -m smg_grpc_servicer.mlx --model demo", "serve a model on MLX"),
    ("vllm serve MODEL --grpc", "serve it on vLLM, beside which this is installed"),
    ("sglang serve --model-path MODEL --smg-grpc-mode", "the same on SGLang"),
    ("python -m smg_grpc_servicer.vllm.rust", "what the installed wheel smg can do"),
    ("python -m smg_grpc_servicer.testing --engine vllm", "serve a proto without an engine"),
    ("python -m smg_grpc_servicer.conformance ADDRESS", "check any servicer from outside"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print them; each has a `--help` of its own."""
    width = max(len(command) for command, _ in COMMANDS) + 2
    listed = "\n".join(f"  {command:<{width}}{what}" for command, what in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer",
        usage="%(prog)s [-h] [--version]",
        description="Print the version and the commands there are; each has a --help of its own.",
        epilog=listed,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"smg-grpc-servicer {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(argv)
    print(f"{version}\n\n{listed}")


if __name__ == "__main__":
    main()
