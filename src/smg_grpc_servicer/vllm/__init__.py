"""The vLLM wing. Importing it imports no engine."""
