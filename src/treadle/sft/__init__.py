"""The supervised stage (`treadle sft`): train on rows, or on the best completions of a run, without an engine.

command.py    check the settings, prepare the rows, start the trainer, show its progress    (the launcher's process)
data.py       rows -> tokens, and which of them carry loss
rollouts.py   the completions of a run that scored well -> the same
trainer.py    batches of these rows for the training loop of treadle.train                   (the trainer's processes)
"""
