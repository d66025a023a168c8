"""`python -m smg_grpc_servicer.mlx`."""

from __future__ import annotations

from smg_grpc_servicer.core.quiet import quiet_interrupt, silence_core

if __name__ == "__main__":
    silence_core()
    with quiet_interrupt():
        from smg_grpc_servicer.mlx.server import main

    main()
