"""Code that a model wrote, run so that it can neither cheat nor do harm.

`runs.py` is the side that we call; everything else happens in processes that fence themselves in (`fence.py`) before
the first foreign line runs. Two kinds of tests:

- input and output: the answer is a program. It gets the input and nothing else; its output is compared out here.
- Python tests: the answer is loaded by one process (`answer.py`), the tests run in another (`examiner.py`). Between
  them go calls and plain values (`values.py`), never objects. So the answer sees no test, no expected value and no
  verdict: there is nothing to read, to override or to forge. An object whose `==` is always true does not equal 5,
  because the 5 is compared where the object is not; and the 5 is not sent to it to be subtracted or looked for either.
  What a test itself hands to the answer, as arguments of a call, the answer sees and judges as it likes.

What each process has (Linux; x86_64 and aarch64):

| | by |
|---|---|
| no network, no other processes or programs, no signals to others, no shared memory, no message queues | seccomp |
| opens files for reading only, changes and locks none, watches none | seccomp, RLIMIT_FSIZE |
| reads the standard library and the system's shared libraries, nothing else | Landlock |
| limits of CPU time, memory, open files; no core dumps | rlimits |
| limits of wall-clock time and output; killed when over, and when its parent dies | the parent |
| no privileges, also where we are root; nobody's memory | capset, no_new_privs, seccomp |
| an empty folder, an empty environment, only its own descriptors | the parent |

The filter of seccomp lists what is allowed; Landlock decides what may be read, so its first version is enough. Where
the system lacks one of them, nothing is run and an error says so, unless `allow_weak` is set.

Not isolated: the kernel (a flaw in it, or in the processor, is a way out), the machine's load within the limits, the
clock, and that a file exists (its name, size, dates and where a link points may be asked for, not its content). For
code that is written to attack, and not merely to score, run the whole environment in a virtual machine.
"""
