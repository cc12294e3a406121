"""Seccomp filter: denies system calls that create namespaces and mounts, access other processes,
load code into the kernel, or allocate memory that is not counted.

A deny list: namespaces and dropped privileges are the boundary, the filter reduces the kernel
surface behind them. Architectures without a table have no filter (``instructions`` returns None).
"""

from __future__ import annotations

import errno
import platform
import struct

from . import kernel

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

_X86_64 = """ptrace 101, process_vm_readv 310, process_vm_writev 311, kcmp 312, pidfd_getfd 438, process_madvise 440,
mount 165, umount2 166, pivot_root 155, chroot 161, open_tree 428, move_mount 429, fsopen 430, fsconfig 431,
fsmount 432, fspick 433, mount_setattr 442, open_tree_attr 467, unshare 272, setns 308, swapon 167, swapoff 168,
bpf 321, perf_event_open 298, userfaultfd 323, io_uring_setup 425, io_uring_enter 426, io_uring_register 427,
add_key 248, request_key 249, keyctl 250, kexec_load 246, kexec_file_load 320, init_module 175, finit_module 313,
delete_module 176, open_by_handle_at 304, name_to_handle_at 303, quotactl 179, quotactl_fd 443, acct 163, reboot 169,
settimeofday 164, clock_settime 227, clock_adjtime 305, adjtimex 159, syslog 103, fanotify_init 300, lookup_dcookie 212,
personality 135, iopl 172, ioperm 173, modify_ldt 154, memfd_create 319, memfd_secret 447, shmget 29, msgget 68,
semget 64, mq_open 240, set_mempolicy 238, mbind 237, move_pages 279, migrate_pages 256, vhangup 153"""
_AARCH64 = """ptrace 117, process_vm_readv 270, process_vm_writev 271, kcmp 272, pidfd_getfd 438, process_madvise 440,
mount 40, umount2 39, pivot_root 41, chroot 51, open_tree 428, move_mount 429, fsopen 430, fsconfig 431, fsmount 432,
fspick 433, mount_setattr 442, open_tree_attr 467, unshare 97, setns 268, swapon 224, swapoff 225, bpf 280,
perf_event_open 241, userfaultfd 282, io_uring_setup 425, io_uring_enter 426, io_uring_register 427, add_key 217,
request_key 218, keyctl 219, kexec_load 104, kexec_file_load 294, init_module 105, finit_module 273, delete_module 106,
open_by_handle_at 265, name_to_handle_at 264, quotactl 60, quotactl_fd 443, acct 89, reboot 142, settimeofday 170,
clock_settime 112, clock_adjtime 266, adjtimex 171, syslog 116, fanotify_init 262, lookup_dcookie 18, personality 92,
memfd_create 279, memfd_secret 447, shmget 194, msgget 186, semget 190, mq_open 180, set_mempolicy 237, mbind 235,
move_pages 239, migrate_pages 238, vhangup 58"""
TABLES = {"x86_64": _X86_64, "aarch64": _AARCH64}
_PRETENDED_X86_64 = """chmod 90, fchmod 91, fchmodat 268, fchmodat2 452, chown 92, fchown 93, lchown 94, fchownat 260,
setxattr 188, lsetxattr 189, fsetxattr 190, setxattrat 463, removexattr 197, lremovexattr 198, fremovexattr 199,
removexattrat 466, utimensat 280, utime 132, utimes 235, futimesat 261"""
_PRETENDED_AARCH64 = """fchmod 52, fchmodat 53, fchmodat2 452, fchown 55, fchownat 54, setxattr 5, lsetxattr 6,
fsetxattr 7, setxattrat 463, removexattr 14, lremovexattr 15, fremovexattr 16, removexattrat 466, utimensat 88"""
PRETENDED = {"x86_64": _PRETENDED_X86_64, "aarch64": _PRETENDED_AARCH64}
"""Calls that change a file's metadata. Landlock permits them on every file of the host that the
user owns; where Landlock is the boundary, the filter makes them return success and do nothing, so
that copying a file still works."""
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
IOCTL = {"x86_64": 16, "aarch64": 29}
CLONE3 = 435
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
NAMESPACES = kernel.ALL_NAMESPACES | kernel.CLONE_NEWTIME

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data, low words
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def numbers(table: str) -> dict[str, int]:
    """System-call name -> number."""
    return {name: int(number) for name, number in (entry.split() for entry in table.split(","))}


def instructions(pretend: bool = False) -> bytes | None:
    """BPF program for this machine, None if unsupported. ``pretend``: fake success of
    ``PRETENDED``."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        return None
    code = [
        _op(_LOAD, 0, 0, _ARCHITECTURE),
        _op(_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        _op(_RETURN, 0, 0, _KILL),
        _op(_LOAD, 0, 0, _NUMBER),
        _op(_JUMP_ABOVE, 0, 1, X32_BIT),
        _op(_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    code += _refuse_when(
        CLONE[machine], _FIRST, [_op(_JUMP_SET, 0, 1, NAMESPACES), _refuse(errno.EPERM)]
    )
    code += _refuse_when(SOCKET[machine], _FIRST, _only(FAMILIES, errno.EAFNOSUPPORT))
    for request in (TIOCSTI, TIOCLINUX):
        code += _refuse_when(
            IOCTL[machine], _SECOND, [_op(_JUMP_EQUAL, 0, 1, request), _refuse(errno.EPERM)]
        )
    refused = dict.fromkeys(numbers(TABLES[machine]).values(), errno.EPERM) | {CLONE3: errno.ENOSYS}
    if pretend:
        refused |= dict.fromkeys(numbers(PRETENDED[machine]).values(), 0)
    for number, error in refused.items():
        code += [_op(_JUMP_EQUAL, 0, 1, number), _refuse(error)]
    return b"".join([*code, _op(_RETURN, 0, 0, _ALLOW)])


def _op(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _refuse(error: int) -> bytes:
    return _op(_RETURN, 0, 0, _ERRNO | error)


def _only(allowed: tuple[int, ...], error: int) -> list[bytes]:
    checks = [_op(_JUMP_EQUAL, len(allowed) - at, 0, value) for at, value in enumerate(allowed)]
    return [*checks, _refuse(error)]


def _refuse_when(number: int, argument: int, checks: list[bytes]) -> list[bytes]:
    """Apply ``checks`` to one argument of a system call; for what they permit, load the number
    again."""
    body = [_op(_LOAD, 0, 0, argument), *checks, _op(_LOAD, 0, 0, _NUMBER)]
    return [_op(_JUMP_EQUAL, 0, len(body), number), *body]
