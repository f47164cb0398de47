"""HTTP servers and clients, access tokens, worker processes, Prometheus text."""
