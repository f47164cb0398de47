"""`treadle doctor`: what is wrong with this machine, or with a run that goes on, and the command that fixes it.

command.py       look, judge, print
finding.py       a check and its verdict
looking.py       what is asked of the machine: files, libraries, other processes
software.py      pure: Python, torch, the driver, vLLM, and their fit together
requirements.py  pure: versions and the ranges they are asked for in
hardware.py      pure: processors, memory, disks, limits, ports, clock
settings.py      pure: variables of the environment, tokens, the model
sharing.py       two real processes that share weights, in main memory and on a GPU
live.py          a hub and an engine that serve now
logs.py          pure: what the last lines of a log mean
"""
