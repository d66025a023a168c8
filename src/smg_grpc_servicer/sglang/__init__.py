"""The SGLang wing. Importing it imports no engine."""
