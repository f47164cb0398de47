"""Find what is wrong with this machine or with a run, and name the command that fixes it (`treadle doctor`).

command.py    collects the findings and prints them
survey.py     facts about this machine: packages, model files, driver, ports, clock; two processes that share weights
checks.py     pure: software and hardware of this machine
live.py       a hub and an engine that serve now, and the logs of a run
"""
