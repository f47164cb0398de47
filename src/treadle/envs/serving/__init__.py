"""`treadle env NAME serve`: groups for the hub, in waves or as a stream."""
