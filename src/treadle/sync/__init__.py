"""How new weights reach an engine. Each mode is a file with the same two verbs (receipt.py): attach and publish."""
