"""What the sandbox refuses and what it allows, each tried in a real sandboxed process."""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.envs.sandbox_support import needs_sandbox
from treadle.envs.sandbox import restrict
from treadle.envs.sandbox.execution import SandboxLimits, run_tests

pytestmark = needs_sandbox

LIMITS = SandboxLimits(test_s=5, total_s=20, memory_mb=256)


HARM = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "a socket of any kind": "import socket\nsocket.socket(socket.AF_UNIX)",
    "datagrams to others": "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "another end for a pair": "import socket\nsocket.socketpair()[0].connect('/run/x')",
    "an address for a pair": "import socket\nsocket.socketpair()[0].bind('\\0x')",
    "signals by a pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 8, os.getppid())",
    "signals of its choice by a pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 10, 9)",
    "signals to a thread by a pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 15, bytes(8))",
    "signals by a pair of sockets": "import fcntl, socket, struct\n"
    "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', 1))",
    "signals by a pair of sockets, by the older call": "import fcntl, socket, struct\n"
    "fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', 1))",
    "attributes of files": "import fcntl, os\nfcntl.ioctl(open(os.__file__), 0x80086601, bytes(8))",  # only asked for
    "locks on files, as of BSD": "import fcntl, os\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX)",
    "locks on files, as of POSIX": "import fcntl, os\nfcntl.lockf(open(os.__file__), fcntl.LOCK_SH)",
    "leases on files": "import fcntl, os\nfcntl.fcntl(open(os.__file__), 1024, 0)",
    "news of a folder": "import fcntl, os\nfcntl.fcntl(os.open(os.path.dirname(os.__file__) + '/json', 0), 1026, 1)",
    "large pipes": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 1031, 2**20)",
    "a file opened for neither reading nor writing": "import os\nos.open('/dev/null', 3)",
    "another process": "import os\nos.fork()",
    "another program": "import subprocess\nsubprocess.run(['true'])",
    "another program in its place": "import os\nos.execv('/bin/true', ['true'])",
    "signals to its parent": "import os\nos.kill(os.getppid(), 0)",
    "signals to everybody": "import os\nos.kill(-1, 0)",
    "leaving its process group": "import os\nos.setsid()",
    "reading a user's files": "open('/etc/passwd').read()",
    "reading the folders of others": "import os\nos.listdir('/')",
    "reading about processes": "import os\nopen(f'/proc/{os.getppid()}/cmdline').read()",
    "reading its parent's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')",
    "installed packages": "import treadle.envs.tasks.code",
    "writing in its folder": "open('x', 'w')",
    "writing elsewhere": "import tempfile\ntempfile.TemporaryFile()",
    "deleting": "import os\nos.rmdir(os.getcwd())",
    "changing modes": "import os\nos.chmod(os.getcwd(), 0)",
    "its environment": "import os\nassert not set(os.environ) - {'PYTHONHASHSEED', 'LC_CTYPE'}\nraise PermissionError",
    "more time": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (999, 999))",
    "shared memory": "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=1)",
    "a raw system call": "import ctypes\nif ctypes.CDLL(None).syscall(41, 2, 1, 0) < 0: raise PermissionError",
}


C_CALLS = (
    "shmget(0, 1, 0)",
    "shmat(1, None, 0)",
    "shmctl(1, 0, None)",
    "shmdt(4096)",
    "msgget(0, 0)",
    "msgsnd(1, bytes(16), 1, 0)",
    "msgrcv(1, bytes(16), 1, 0, 0)",
    "msgctl(1, 0, None)",
    "semget(0, 1, 0)",
    "semop(1, bytes(6), 1)",
    "semctl(1, 0, 0)",
    "semtimedop(1, bytes(6), 1, None)",
    "mq_unlink(b'/x')",
    "mq_getattr(0, bytes(64))",
    "fallocate(0, 1, 0, 4096)",
    "klogctl(3, bytes(64), 64)",
    "inotify_init1(0)",
    "inotify_add_watch(0, b'/', 1)",
    "fanotify_init(0, 0)",
    "getxattr(b'/', b'user.x', None, 0)",
    "listxattr(b'/', None, 0)",
    "setxattr(b'/nowhere', b'user.x', b'', 0, 0)",
    "name_to_handle_at(-100, b'/', bytes(8), bytes(4), 0)",
    "syncfs(0)",
    "ftruncate(0, 0)",
    "truncate(b'/nowhere', 0)",
    "splice(0, None, 1, None, 1, 0)",
    "mlockall(1)",
    "personality(-1)",
    "getpriority(0, 1)",
)


JUDGED = {
    "open": restrict._OPEN,
    "openat": restrict._OPENAT,
    "clone": restrict._CLONE,
    "socketpair": restrict._SOCKETPAIR,
    "fcntl": restrict._FCNTL,
    "ioctl": restrict._IOCTL,
}
HEADERS = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]


@pytest.mark.parametrize("column", [0, 1], ids=restrict._MACHINES)
def test_the_numbers_of_system_calls_are_those_of_the_kernels_headers(column):
    if not HEADERS[column].exists():
        pytest.skip("the kernel's header is not here")
    header = HEADERS[column].read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header)}
    numbers.setdefault("newfstatat", numbers.get("fstatat", -1))
    same = {"clone3": (restrict._CLONE3,) * 2, "openat2": (restrict._OPENAT2,) * 2}
    for name, both in {**restrict._ALLOWED, **JUDGED, **same}.items():
        assert both[column] == numbers.get(name), name


def judge(column, number, *arguments, architecture=None):
    """What the filter says of a system call, as the kernel would run it."""
    arguments = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture or restrict._ARCHITECTURES[column], 0, *arguments)
    steps = list(struct.iter_unpack("=HBBI", restrict._program(column)))
    place = value = 0
    while steps[place][0] != restrict._RETURN:
        code, if_true, if_false, operand = steps[place]
        place += 1
        if code == restrict._LOAD:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == restrict._AND:
            value &= operand
        else:
            holds = {restrict._EQUAL: value == operand, restrict._AT_LEAST: value >= operand}
            place += if_true if holds.get(code, value & operand) else if_false
    return steps[place][3]


@pytest.mark.parametrize("column", [0, 1], ids=restrict._MACHINES)
def test_the_filter_of_either_machine_allows_what_is_listed_and_no_more(column):
    unknown, refused = restrict._REFUSE | errno.ENOSYS, restrict._REFUSE | errno.EPERM
    listed = {both[column] for both in restrict._ALLOWED.values()}
    judged = {both[column] for both in JUDGED.values()}
    for number in range(600):
        if number not in judged:
            allowed = judge(column, number) == restrict._ALLOW
            assert allowed == (number in listed), number
        assert judge(column, number | 0x40000000) == unknown  # as x32 has it
        assert judge(column, number, architecture=0x40000003) == restrict._KILL  # 32 bits: i386
    for call, place in (("open", 1), ("openat", 2)):
        number = JUDGED[call][column]
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY) if number is not None else ():
            assert judge(column, number, *[0] * place, flags) == restrict._ALLOW
        for flags in (os.O_WRONLY, os.O_RDWR, 3, os.O_TRUNC, os.O_CREAT, os.O_TMPFILE) if number is not None else ():
            assert judge(column, number, *[0] * place, flags) == refused


@pytest.mark.parametrize("what", HARM)
def test_an_answer_cannot_have(what):
    (problem,) = run_tests(HARM[what] + "\ndef f(): return 1\n", ["assert f() == 1"], LIMITS)
    assert re.match(r"PermissionError|ModuleNotFoundError|ValueError: not allowed|FileNotFoundError", problem), problem


def test_an_answer_cannot_make_these_calls_of_the_c_library():
    source = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n" + "".join(
        f"def f{place}():\n    if libc.{call} < 0: raise OSError(ctypes.get_errno(), '')\n"
        for place, call in enumerate(C_CALLS)
    )
    problems = run_tests(source, [f"f{place}()" for place in range(len(C_CALLS))], LIMITS)
    made = [call for call, problem in zip(C_CALLS, problems, strict=True) if not problem.startswith("PermissionError")]
    assert made == []


def test_threads_asyncio_and_the_standard_library_work():
    source = """
import asyncio, collections, concurrent.futures, contextlib, ctypes, dataclasses, datetime, decimal, faulthandler
import hashlib, heapq, io, json, math, mmap, os, random, resource, select, selectors, shutil, signal, socket, sqlite3
import struct, threading, time, uuid, zoneinfo
@dataclasses.dataclass
class Point:
    x: int
async def talk():
    ours, theirs = socket.socketpair()
    one, other = [await asyncio.open_connection(sock=end) for end in (ours, theirs)]
    one[1].writelines([b"a", b"bc\\n"])
    line = await asyncio.wait_for(other[0].readline(), 5)
    return line, await asyncio.to_thread(len, line)
def f():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(len, ["a", "bc"])) == [1, 2]
    assert asyncio.run(talk()) == (b"abc\\n", 4)
    received, sent = os.pipe()
    for waiting in (select.epoll(), select.poll()):
        waiting.register(received, select.POLLIN)
        os.write(sent, b"x")
        assert waiting.poll(5) and os.read(received, 1) == b"x"
    assert select.select([], [sent], [], 5)[1] == [sent]
    os.set_blocking(received, False)
    assert not os.get_blocking(received) and not os.isatty(received)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.02)
    os.close(os.dup(received)), os.close(os.dup2(received, 40))
    time.sleep(0.001), os.times(), os.urandom(1), os.getcwd(), os.listdir(os.path.dirname(json.__file__))
    resource.getrusage(resource.RUSAGE_SELF), os.sched_getaffinity(0), os.uname(), os.getpid(), uuid.uuid4()
    assert os.path.realpath(os.__file__) and os.stat(os.__file__).st_size and os.access(os.__file__, os.R_OK)
    assert shutil.get_terminal_size().columns and mmap.mmap(-1, 4096)[0] == 0
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        assert database.execute("select 1").fetchone() == (1,)
    return 1
"""
    assert run_tests(source, ["assert f() == 1 and Point(3).x == 3"], LIMITS) == [""]


OLDER_LANDLOCK = """
import os, sys
from treadle.envs.sandbox import restrict
version, readable, other = int(sys.argv[1]), sys.argv[2], sys.argv[3]
call, library = restrict._syscall, list(restrict._readable())
restrict._syscall = lambda libc, number, *args: version if args == (None, 0, 1) else call(libc, number, *args)
restrict._readable = lambda: [*library, readable]
assert restrict.restrict_process({}, parent=os.getppid()) == []
assert open(readable).read() == "kept"
for path in (readable, other):
    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, 3):
        for flag in (os.O_TRUNC, os.O_CREAT | os.O_TRUNC):
            try:
                os.open(path, mode | flag)
                print("opened", path, mode, flag)
            except PermissionError:
                pass
"""


@pytest.mark.parametrize("version", [1, 2])
def test_older_versions_of_landlock_let_no_file_be_truncated(version, tmp_path):
    """They know nothing of truncation; the process sees an older version than this system has."""
    files = [tmp_path / "readable", tmp_path / "other"]
    for file in files:
        file.write_text("kept")
    arguments = [sys.executable, "-c", OLDER_LANDLOCK, str(version), *map(str, files)]
    run = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60)
    assert [run.stdout, *(file.read_text() for file in files)] == ["", "kept", "kept"]


WITHOUT_LANDLOCK = """
import ctypes, struct, sys
from treadle.envs.sandbox.execution import SandboxLimits, check_sandbox
from treadle.errors import ConfigError
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("@HxxxxxxQ", len(steps), ctypes.addressof(program)), 0, 0) == 0
try:
    check_sandbox(SandboxLimits())
except ConfigError as error:
    print(error)
check_sandbox(SandboxLimits(allow_weak=True))
print("runs when it must")
"""


def test_a_missing_restriction_is_an_error_that_names_it_and_nothing_runs():
    """The system call that Landlock begins with is refused, as by a kernel that does not have it."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_LANDLOCK], check=True, capture_output=True, text=True, timeout=60
    )
    assert "it lacks files (Landlock: Function not implemented)" in run.stdout
    assert "allow_weak_sandbox" in run.stdout
    assert run.stdout.endswith("runs when it must\n")
