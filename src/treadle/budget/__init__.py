"""Estimate the memory of a job before it starts, and suggest settings with which it fits (`treadle plan`).

shapes        dimensions of a model -> exact parameter counts
hardware      memory of GPUs by name and of this machine; every measured constant of the estimate
job           PlannedJob (input) and Budget (result), free of configuration files
estimate      PlannedJob + Machine -> Budget. Pure.
suggestions   changes of settings with which a job fits. Pure.
output        Budget -> table, JSON, and the commands that start the job
command       flags -> PlannedJob + Machine; `treadle plan` and `treadle run --fit`

No model is loaded, and torch is never imported.
"""

from __future__ import annotations

from treadle.budget.estimate import estimate
from treadle.budget.hardware import Machine
from treadle.budget.job import Budget, Component, MemoryPool, PlannedJob
from treadle.budget.shapes import ModelShape, find_shape
from treadle.budget.suggestions import Suggestion, largest_micro_tokens, suggest

__all__ = [
    "Budget",
    "Component",
    "Machine",
    "MemoryPool",
    "ModelShape",
    "PlannedJob",
    "Suggestion",
    "estimate",
    "find_shape",
    "largest_micro_tokens",
    "suggest",
]
