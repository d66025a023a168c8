"""The hand-off to Rust: the binding answers requests, Python starts the engine and watches both."""
