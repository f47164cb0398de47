"""vLLM engine: runs vLLM's stock server as a child process on loopback, and uses its public extension points only.

start.py             find vLLM, start the server, return an engine
command.py           the installed version and its limits; settings -> command line and environment of the server
server_process.py    the child process; child_guard.py ends it when this process dies
client.py            HTTP calls to the server
completions.py       messages of POST /treadle/generate
admission.py         requests that wait while weights change; counters; changes one at a time
adapters.py          LoRA adapters
engine.py            the engine interface (engines/interface.py)
middleware.py        runs inside vLLM's API process: blocks unused routes, adds Treadle's
worker.py            runs inside vLLM's worker: loads weights, shares them with a trainer; cpu_lora.py
"""
