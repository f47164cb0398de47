"""vLLM behind the engine's port: its stock server as a child on loopback, reached by its public seams only.

start.py           finds vLLM, starts it, gives an Engine
command.py         settings -> the server's command line and environment
server_process.py  the child: started, waited for, ended with us (guard.py)
client.py          calls to it
engine.py          the port
middleware.py      inside its API process: closes the routes we do not use, adds ours
loader.py, worker.py  inside its worker: weights that a trainer can read and write
"""
