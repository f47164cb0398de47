"""`treadle plan`: how much memory a job would take, and what would make it fit. Nothing is loaded, torch least of all.

calibration   every measured constant, in one place
shapes        a model's dimensions -> exact parameter counts         cards   GPUs by name, this machine's memory
activations   what a forward keeps for the backward, part by part
job           what is planned: a frozen value, free of configuration files
accounting    job + machine -> Budget (`estimate`)                   levers  what would make it fit
request       flags -> job + machine                                 drawing  Budget -> table or JSON
start         job + flags -> the commands that start it
"""

from treadle.launch.budget.accounting import estimate
from treadle.launch.budget.cards import Machine
from treadle.launch.budget.job import Job
from treadle.launch.budget.levers import Suggestion, largest_micro_tokens, suggest
from treadle.launch.budget.result import Budget, Component, Place
from treadle.launch.budget.shapes import ModelShape, find_shape

__all__ = [
    "Budget",
    "Component",
    "Job",
    "Machine",
    "ModelShape",
    "Place",
    "Suggestion",
    "estimate",
    "find_shape",
    "largest_micro_tokens",
    "suggest",
]
