"""Name every wait of a process, log slow ones, and report them to the hub.

waits.py      what this process waits for
watchdog.py   a thread that logs slow waits, dumps stacks when a deadline has passed, and reports to the hub
describe.py   reports in words
stacks.py     the stacks of all threads and tasks of this process
"""
