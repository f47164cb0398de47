"""Run smg, a router in front of the engines of a run, and give it only engines that have proved their weights."""
