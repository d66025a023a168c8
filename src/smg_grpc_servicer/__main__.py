"""`python -m smg_grpc_servicer`: the version, and the commands there are."""

from __future__ import annotations

from smg_grpc_servicer import __version__

COMMANDS = (
    ("python -m smg_grpc_servicer.mlx --model demo", "serve a model on MLX"),
    ("vllm serve MODEL --grpc", "serve it on vLLM, beside which this is installed"),
    ("sglang serve --model-path MODEL --smg-grpc-mode", "the same on SGLang"),
    ("python -m smg_grpc_servicer.vllm.rust", "what the installed wheel smg can do"),
    ("python -m smg_grpc_servicer.testing --engine vllm", "serve a proto without an engine"),
    ("python -m smg_grpc_servicer.conformance ADDRESS", "check any servicer from outside"),
)


def main() -> None:
    """Print them; each has a `--help` of its own."""
    print(f"smg-grpc-servicer {__version__}\n")
    for command, what in COMMANDS:
        print(f"  {command:<51}{what}")


if __name__ == "__main__":
    main()
