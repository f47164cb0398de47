"""The page of a run: charts, rollouts, processes. Served by the hub (routes.py) or exported into one file."""
