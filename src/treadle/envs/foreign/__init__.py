"""Agents and environments of other projects: they speak OpenAI's wire to a recorder, which loses no token."""
