"""The requests an engine answers before its first client: which, and how they are sent."""
