"""Programs and environments that know nothing of us."""
