"""A real environment of the library verifiers: say a digit, then another one. Two turns, a reward and a metric."""

from digits_v1.environment import DigitsHarness, DigitsTaskset

__all__ = ["DigitsHarness", "DigitsTaskset"]
