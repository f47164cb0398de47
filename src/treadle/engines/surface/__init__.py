"""The HTTP surface of an engine, whichever it is: written against `engines/port.py` only."""
