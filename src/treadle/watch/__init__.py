"""Nothing waits in silence: every wait has a name, a deadline and somebody whose turn it is.

waits.py      what this process waits for
watchdog.py   a thread that says what takes long, writes the stacks when a deadline has passed, and reports to the hub
heartbeat.py  the report, on its way to the hub
telling.py    a report, in words
stacks.py     where every thread and task of this process stands
"""
