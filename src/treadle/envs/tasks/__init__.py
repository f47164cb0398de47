"""The built-in environments, one file for each."""
