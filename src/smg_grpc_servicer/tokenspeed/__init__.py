"""The TokenSpeed wing. Importing it imports no engine."""
