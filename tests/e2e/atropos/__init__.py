"""Programs that .venv-atropos' Python runs, written against the real atroposlib, and how the tests start them."""
