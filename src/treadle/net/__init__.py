"""HTTP servers and clients, access tokens, frames between processes, Prometheus text."""
