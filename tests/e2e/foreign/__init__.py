"""Programs and environments that do not use Treadle's API."""
