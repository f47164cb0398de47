"""How new weights reach an engine. Each mode is a file with the same verb: `publish(policy, version) -> Receipt`."""
