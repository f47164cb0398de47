"""Agents and environments of other projects: they call a recorder with OpenAI's API, which keeps every token."""
