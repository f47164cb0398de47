"""Irrevocably restrict the current process: limits, capabilities, files, system calls. Standard library only.

This runs in the sandboxed process, before untrusted code does. As in all modules that such a process imports, `typing`
is not imported: that alone takes as long as Python's start.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterator, Mapping

# <linux/prctl.h>
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL = 9
_EPERM, _ENOSYS = 1, 38


class RestrictionUnavailable(Exception):
    """This system cannot apply a restriction."""


def restrict_process(limits: Mapping[str, int], *, parent: int) -> list[str]:
    """Drop everything that plain Python does not need; returns the restrictions that this system lacks."""
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    missing = []
    libc = ctypes.CDLL(None, use_errno=True)
    restrictions = (("privileges", _drop_privileges), ("files", _lock_files), ("system calls", _filter_system_calls))
    for name, apply in restrictions:
        try:
            apply(libc)
        except RestrictionUnavailable as error:
            missing.append(f"{name} ({error})")
    if os.getppid() != parent:  # the parent died before PDEATHSIG was set
        os._exit(1)
    return missing


def _call(libc: ctypes.CDLL, name: str, *args: object) -> int:
    function = getattr(libc, name, None)
    if function is None:
        raise RestrictionUnavailable(f"there is no {name} on {sys.platform}")
    result = function(*args)
    if result < 0:
        raise RestrictionUnavailable(f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(result)


def _prctl(libc: ctypes.CDLL, option: int, *args: object) -> None:
    padded = [*args, *(ctypes.c_ulong(0) for _ in range(4 - len(args)))]
    _call(libc, "prctl", option, *padded)


def _drop_privileges(libc: ctypes.CDLL) -> None:
    _prctl(libc, _SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL))
    _prctl(libc, _SET_DUMPABLE, ctypes.c_ulong(0))  # no other process of this user can read its memory
    _prctl(libc, _SET_NO_NEW_PRIVS, ctypes.c_ulong(1))
    # Version 3 of the header: two words for each of the three sets of capabilities, all empty.
    _call(libc, "capset", struct.pack("=II", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0))


# -- files: Landlock ---------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NOT_THE_LIBRARY = ("site-packages", "dist-packages")


def _lock_files(libc: ctypes.CDLL) -> None:
    abi = _syscall(libc, _CREATE_RULESET, None, 0, 1)
    # All rights that this kernel knows are handled, hence refused: files; from 4 on TCP; from 6 on signals and sockets.
    # The system call filter leaves only reading to Landlock, which has it since its first version.
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _syscall(libc, _CREATE_RULESET, attributes, len(attributes), 0)
    for path in _readable():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not on this system
        right = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        _syscall(libc, _ADD_RULE, ruleset, 1, struct.pack("=Qi", right, place), 0)
        os.close(place)
    _syscall(libc, _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _syscall(libc: ctypes.CDLL, number: int, *args: object) -> int:
    if sys.platform != "linux":
        raise RestrictionUnavailable(f"there is no Landlock on {sys.platform}")
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in args]
    try:
        return _call(libc, "syscall", ctypes.c_long(number), *wide)
    except RestrictionUnavailable as error:
        raise RestrictionUnavailable(str(error).replace("syscall", "Landlock")) from None


def _readable() -> Iterator[str]:
    """The standard library without installed packages, and the files that its modules load."""
    library = os.path.dirname(os.__file__)
    yield from (entry.path for entry in os.scandir(library) if entry.name not in _NOT_THE_LIBRARY)
    yield from (entry.path for entry in os.scandir(os.path.dirname(library)) if not entry.is_dir())
    triplet = getattr(sys.implementation, "_multiarch", "")
    yield from (f"{root}/{triplet}" for root in ("/lib", "/usr/lib") if triplet)
    yield from ("/lib64", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
    yield from ("/dev/null", "/dev/urandom")


# -- system calls: seccomp ---------------------------------------------------------------------------------------------


# What plain Python needs for its own memory, threads, descriptors and time, and for querying files. Everything else is
# refused: Landlock does not cover many operations on files (length, attributes, locks, watches) in all versions.
_ALLOWED: dict[str, tuple[int, int | None]] = {  # on x86_64 and on aarch64
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "brk": (12, 214),
    "madvise": (28, 233), "msync": (26, 227), "membarrier": (324, 283),
    "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168), "arch_prctl": (158, None),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None), "getpgid": (121, 155),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150),
    "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
# Allowed with some arguments only. (`creat` and `truncate` are not listed at all.)
_OPEN, _OPENAT, _CLONE, _SOCKETPAIR, _FCNTL, _IOCTL = (2, None), (257, 56), (56, 220), (53, 199), (72, 25), (16, 29)
# Access mode 3 opens for neither reading nor writing, which Landlock allows, but suffices for ioctl and O_TRUNC.
_NOT_READING = 0o3 | os.O_CREAT | os.O_TRUNC | 0o20000000  # the last is the bit of O_TMPFILE
_CLONE_THREAD = 0x00010000
_AF_UNIX, _SOCK_STREAM, _SOCK_KIND = 1, 1, 0xF
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
# TCGETS (for isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# The C library has fallbacks for these. The flags of the first two are in memory, which the filter cannot read.
_CLONE3, _OPENAT2, _FIRST_UNKNOWN = 435, 437, 450  # the same on every architecture; from 450 on younger than this list
_MACHINES = ("x86_64", "aarch64")
_ARCHITECTURES = (0xC000003E, 0xC00000B7)  # <linux/audit.h>

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # of classic BPF
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def _filter_system_calls(libc: ctypes.CDLL) -> None:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _MACHINES:
        raise RestrictionUnavailable(f"no list of system calls for {sys.platform} on {machine}")
    program = _program(_MACHINES.index(machine))
    instructions = ctypes.create_string_buffer(program)
    filter_ = struct.pack("@HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))  # struct sock_fprog
    _prctl(libc, _SET_SECCOMP, ctypes.c_ulong(2), filter_)


def _program(column: int) -> bytes:
    """The BPF program: refuse what is not listed.

    Files are opened for reading only. `clone` may only create threads. `socketpair` may only create streams, which
    asyncio needs to wake itself: unlike a datagram socket, a stream reaches only its other end.
    """

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def unknown(test: int, number: int) -> bytes:
        return step(test, number, 0, 1) + step(_RETURN, _REFUSE | _ENOSYS)

    def argument(position: int) -> bytes:
        return step(
            _LOAD, _ARGUMENTS_AT + 8 * position
        )  # the lower half, which is all that the kernel uses in these calls

    def only_if(test: int, *values: int) -> bytes:
        """Continue if the test holds for one of these values; refuse the call otherwise."""
        tests = [step(test, value, len(values) - place) for place, value in enumerate(values)]
        return b"".join(tests) + step(_RETURN, _REFUSE | _EPERM)

    def call(numbers: tuple[int | None, int | None], *steps: bytes) -> bytes:
        """Allow this call unless one of the steps refuses it."""
        number = numbers[column]
        body = b"".join(steps) + step(_RETURN, _ALLOW)
        return b"" if number is None else step(_EQUAL, number, 0, len(body) // 8) + body

    only_reading = step(_AND, _NOT_READING) + only_if(_EQUAL, 0)
    numbers = [both[column] for both in _ALLOWED.values()]
    return b"".join(
        [
            step(_LOAD, _ARCHITECTURE_AT),
            step(_EQUAL, _ARCHITECTURES[column], 1, 0) + step(_RETURN, _KILL),  # 32-bit calls have other numbers
            step(_LOAD, _NUMBER_AT),
            unknown(_AT_LEAST, _FIRST_UNKNOWN),  # also those of x32, which have a high bit set
            unknown(_EQUAL, _CLONE3),
            unknown(_EQUAL, _OPENAT2),
            call(_OPEN, argument(1) + only_reading),
            call(_OPENAT, argument(2) + only_reading),
            call(_CLONE, argument(0) + only_if(_HAS_BIT, _CLONE_THREAD)),
            call(
                _SOCKETPAIR,
                argument(0) + only_if(_EQUAL, _AF_UNIX),
                argument(1) + step(_AND, _SOCK_KIND) + only_if(_EQUAL, _SOCK_STREAM),
            ),
            call(_FCNTL, argument(1) + only_if(_EQUAL, *_FCNTL_COMMANDS)),
            call(_IOCTL, argument(1) + only_if(_EQUAL, *_IOCTL_COMMANDS)),
            only_if(_EQUAL, *(number for number in numbers if number is not None)),
            step(_RETURN, _ALLOW),
        ]
    )
