"""The built-in environments, a file for each."""
