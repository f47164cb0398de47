"""Estimate the memory of a job before it starts, and suggest settings with which it fits (`treadle plan`).

shapes        dimensions of a model -> exact parameter counts
hardware      memory of GPUs by name and of this machine; every measured constant of the estimate
job           PlannedJob (input) and Budget (result), free of configuration files
activations   activations of a micro-batch. Pure.
estimate      PlannedJob + Machine -> Budget. Pure.
placement     which GPUs the engine and the trainer ranks use. Pure.
request       flags -> PlannedJob + Machine
suggestions   changes of settings with which a job fits. Pure.
output        Budget -> table, JSON, and the command that starts the job
command       `treadle plan` and `treadle run --fit`

No model is loaded, and torch is never imported.
"""
