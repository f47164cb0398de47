"""Report on a run: its history, its summary, and one HTML file that shows them."""
