"""A process takes its own rights away, for good: limits, capabilities, files, system calls. Standard library only.

This runs in the process that is fenced in, before foreign code does. Nothing here can be undone from inside. As in all
modules that such a process imports, `typing` stays out: its import alone takes as long as Python's start.
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


class FenceError(Exception):
    """This system has no such fence."""


def fence_in(limits: Mapping[str, int], *, parent: int) -> list[str]:
    """Give up everything that running plain Python does not need; returns which fences this system lacks."""
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    missing = []
    libc = ctypes.CDLL(None, use_errno=True)
    fences = (("privileges", _drop_privileges), ("files", _lock_files), ("system calls", _filter_system_calls))
    for name, raise_fence in fences:
        try:
            raise_fence(libc)
        except FenceError as error:
            missing.append(f"{name} ({error})")
    if os.getppid() != parent:  # it died before we asked to die with it
        os._exit(1)
    return missing


def _call(libc: ctypes.CDLL, name: str, *args: object) -> int:
    function = getattr(libc, name, None)
    if function is None:
        raise FenceError(f"there is no {name} on {sys.platform}")
    result = function(*args)
    if result < 0:
        raise FenceError(f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(result)


def _prctl(libc: ctypes.CDLL, option: int, *args: object) -> None:
    padded = [*args, *(ctypes.c_ulong(0) for _ in range(4 - len(args)))]
    _call(libc, "prctl", option, *padded)


def _drop_privileges(libc: ctypes.CDLL) -> None:
    _prctl(libc, _SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL))
    _prctl(libc, _SET_DUMPABLE, ctypes.c_ulong(0))  # no other process of this user looks into our memory
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
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _syscall(libc, _CREATE_RULESET, attributes, len(attributes), 0)
    for path in _readable():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # another system has it elsewhere, and what is not there needs no right
        right = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        _syscall(libc, _ADD_RULE, ruleset, 1, struct.pack("=Qi", right, place), 0)
        os.close(place)
    _syscall(libc, _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _syscall(libc: ctypes.CDLL, number: int, *args: object) -> int:
    if sys.platform != "linux":
        raise FenceError(f"there is no Landlock on {sys.platform}")
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in args]
    try:
        return _call(libc, "syscall", ctypes.c_long(number), *wide)
    except FenceError as error:
        raise FenceError(str(error).replace("syscall", "Landlock")) from None


def _readable() -> Iterator[str]:
    """The standard library without what was installed beside it, and what its modules load."""
    library = os.path.dirname(os.__file__)
    yield from (entry.path for entry in os.scandir(library) if entry.name not in _NOT_THE_LIBRARY)
    yield from (entry.path for entry in os.scandir(os.path.dirname(library)) if not entry.is_dir())
    triplet = getattr(sys.implementation, "_multiarch", "")
    yield from (f"{root}/{triplet}" for root in ("/lib", "/usr/lib") if triplet)
    yield from ("/lib64", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
    yield from ("/dev/null", "/dev/urandom")


# -- system calls: seccomp ---------------------------------------------------------------------------------------------


# What plain Python can do without. (The calls that open files are Landlock's to judge; it does not know of modes.)
_REFUSED: dict[str, tuple[int, int | None]] = {  # on x86_64 and on aarch64
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "io_uring_setup": (425, 425),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "shmdt": (67, 197), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185), "fallocate": (285, 47), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "truncate": (76, 45), "open_by_handle_at": (304, 265), "setrlimit": (160, 164),
    "prlimit64": (302, 261), "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "setsid": (112, 157),
    "setpgid": (109, 154), "prctl": (157, 167),
}  # fmt: skip
# What is refused or allowed by its arguments.
_CLONE, _SOCKETPAIR, _FCNTL, _IOCTL = (56, 220), (53, 199), (72, 25), (16, 29)
_CLONE3 = 435
_CLONE_THREAD = 0x00010000
_AF_UNIX, _SOCK_STREAM, _SOCK_KIND = 1, 1, 0xF
_SETOWN, _SETSIG, _SETOWN_EX = 8, 10, 15  # of fcntl: who is sent a signal when a file is ready, and which
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902  # of ioctl: the same for sockets
_FIRST_UNKNOWN = 450  # younger calls than this list knows
_MACHINES = ("x86_64", "aarch64")
_ARCHITECTURES = (0xC000003E, 0xC00000B7)  # <linux/audit.h>

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # of classic BPF
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24  # in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def _filter_system_calls(libc: ctypes.CDLL) -> None:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _MACHINES:
        raise FenceError(f"no list of system calls for {sys.platform} on {machine}")
    program = _program(_MACHINES.index(machine))
    instructions = ctypes.create_string_buffer(program)
    filter_ = struct.pack("@HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))  # struct sock_fprog
    _prctl(libc, _SET_SECCOMP, ctypes.c_ulong(2), filter_)


def _program(column: int) -> bytes:
    """The filter: refuse what is listed and what is unknown.

    Of `clone`, threads are allowed. Of `socketpair`, what asyncio wakes itself with: unlike a datagram, a stream goes
    nowhere but to its other end.
    """

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def refuse(test: int, number: int, error: int) -> bytes:
        return step(test, number, 0, 1) + step(_RETURN, _REFUSE | error)

    def only_if(test: int, value: int) -> bytes:
        return step(test, value, 1, 0) + step(_RETURN, _REFUSE | _EPERM)

    def call(numbers: tuple[int, int], *steps: bytes) -> bytes:
        """These steps judge this call; it is allowed when they do not refuse it."""
        body = b"".join(steps) + step(_RETURN, _ALLOW)
        return step(_EQUAL, numbers[column], 0, len(body) // 8) + body

    first, second = step(_LOAD, _FIRST_ARGUMENT_AT), step(_LOAD, _SECOND_ARGUMENT_AT)
    numbers = [both[column] for both in _REFUSED.values()]
    return b"".join(
        [
            step(_LOAD, _ARCHITECTURE_AT),
            step(_EQUAL, _ARCHITECTURES[column], 1, 0) + step(_RETURN, _KILL),  # 32-bit calls have other numbers
            step(_LOAD, _NUMBER_AT),
            refuse(_AT_LEAST, _FIRST_UNKNOWN, _ENOSYS),
            refuse(_EQUAL, _CLONE3, _ENOSYS),  # its flags lie in memory; the C library then takes clone
            *(refuse(_EQUAL, number, _EPERM) for number in numbers if number is not None),
            call(_CLONE, first, only_if(_HAS_BIT, _CLONE_THREAD)),
            call(
                _SOCKETPAIR,
                first + only_if(_EQUAL, _AF_UNIX),
                second + step(_AND, _SOCK_KIND) + only_if(_EQUAL, _SOCK_STREAM),
            ),
            call(_FCNTL, second, *(refuse(_EQUAL, command, _EPERM) for command in (_SETOWN, _SETSIG, _SETOWN_EX))),
            call(_IOCTL, second, *(refuse(_EQUAL, command, _EPERM) for command in (_FIOSETOWN, _SIOCSPGRP))),
            step(_RETURN, _ALLOW),
        ]
    )
