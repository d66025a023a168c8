"""gRPC servicers that put vLLM, SGLang, TokenSpeed and MLX behind the SMG gateway."""

__version__ = "1.0.0.dev0"
