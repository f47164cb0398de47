"""The rollout API process: environments post scored groups, a trainer takes them in batches."""
