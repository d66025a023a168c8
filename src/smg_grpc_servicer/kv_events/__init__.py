"""From an engine's KV-event publisher to `SubscribeKvEvents`; nothing is lost silently.


Needs `pyzmq` and `msgspec`, which every engine that publishes events brings along.
"""
