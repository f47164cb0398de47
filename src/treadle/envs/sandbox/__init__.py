"""Run code that a model wrote, so that it can neither cheat nor do harm.

`execution.py` is the interface; it starts processes that restrict themselves (`restrict.py`) before untrusted code
runs. There are two kinds of tests:

- Input and output: the answer is a program. It gets only the input; the parent compares its output.
- Python tests (`python_tests.py`): one process loads the answer, another runs the tests. They exchange calls and
  plain values, never objects. So the answer sees no test, no expected value and no
  verdict: there is nothing to read, override or forge. An object whose `==` is always true does not equal 5, because
  the comparison happens in the other process; and the 5 is never sent to the answer's process.
  Arguments that a test passes to the answer are visible to the answer.

Restrictions of each process (Linux; x86_64 and aarch64):

| | by |
|---|---|
| no network, no other processes or programs, no signals to others, no shared memory, no message queues | seccomp |
| opens files for reading only, changes and locks none, watches none | seccomp, RLIMIT_FSIZE |
| reads the standard library and the system's shared libraries, nothing else | Landlock |
| limits of CPU time, memory, open files; no core dumps | rlimits |
| limits of wall-clock time and output; killed when over, and when its parent dies | the parent |
| no privileges, even if the parent is root; no access to other processes' memory | capset, no_new_privs, seccomp |
| an empty folder, an empty environment, only its own descriptors | the parent |

The seccomp filter is an allow list; Landlock decides what may be read, so its first version is enough. If the system
lacks one of them, nothing is run and an error is raised, unless `allow_weak` is set.

Not isolated: the kernel (a flaw in it, or in the processor, is a way out), the machine's load within the limits, the
clock, and the existence of files (name, size, dates and link targets can be queried, not the content). Against code
that is written to attack, and not merely to score, run the whole environment in a virtual machine.
"""
