"""Find what is wrong with this machine or with a run, and name the command that fixes it (`treadle doctor`).

command.py    collects the findings and prints them
survey.py     facts about this machine: packages, model files, driver, ports, clock
software.py   pure: Python, torch, driver, vLLM, and whether they fit together
host.py       pure: processor, memory, disks, limits, ports, clock, environment variables, tokens, the model
sharing.py    two processes that share weights, in host memory and on a GPU
live.py       a hub and an engine that serve now, and the logs of a run
"""
