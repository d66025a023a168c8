"""Black-box checks of a servicer: give it an address, it says which promises hold.

Run as `python -m smg_grpc_servicer.conformance ADDRESS`. It needs nothing but the port, speaks all
four protos, and works against any servicer of them. Invalid input is sent on purpose; otherwise it
does nothing that a client may not do.
"""
