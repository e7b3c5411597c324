"""What a program may reach: Linux namespaces, or (where these are forbidden) Python's audit hook.

Runs in the sandbox's own processes: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Sequence
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
ATTR_READ_ONLY, ATTR_NOSUID, AT_RECURSIVE = 1, 2, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
NOBODY, INSIDE = 65534, 1000
# What an interpreter needs to run; everything else of the machine is not there.
SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
)  # fmt: skip
DEVICES = ("null", "zero", "full", "random", "urandom")


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_namespaces() -> None:
    """Leaves the machine's network, users, IPC and file system: what remains is a root of read-only
    system folders. Raises OSError where the kernel, or whoever confines us, forbids it."""
    is_root = os.geteuid() == 0
    if platform.machine() not in PIVOT_ROOT:
        raise OSError(0, f"namespaces are not known on {platform.machine()}")
    if not is_root:
        _own_users()
    checked(libc().unshare(NEWNS | NEWUTS | NEWIPC | NEWNET), "unshare")
    _own_root()
    if is_root:  # root is exempt from the limit on processes
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        checked(libc().prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
        _own_users()


def _own_users() -> None:
    uid, gid = os.geteuid(), os.getegid()
    checked(libc().unshare(NEWUSER), "unshare users")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE} {uid} 1"),
        ("gid_map", f"{INSIDE} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [text.encode() or None for text in (source, target, kind)]
    checked(libc().mount(*words, ctypes.c_ulong(flags), options.encode() or None), target)


def _own_root() -> None:
    wanted = [*SYSTEM, os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)]
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/.old")
    checked(libc().syscall(PIVOT_ROOT[platform.machine()], b"/tmp", b"/tmp/.old"), "pivot_root")
    os.chdir("/")
    for path in (*wanted, *(f"/dev/{name}" for name in DEVICES)):
        _show(path)
    for name in ("/tmp", "/proc"):
        os.makedirs(name, exist_ok=True)
    mount("/.old/proc", "/proc", flags=MS_BIND | MS_REC)  # until own_proc
    checked(libc().umount2(b"/.old", MNT_DETACH), "umount")
    os.rmdir("/.old")
    _read_only("/", 0)


def _read_only(path: str, flags: int) -> None:
    values = (ctypes.c_uint64 * 4)(ATTR_READ_ONLY | ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(values))
    done = libc().syscall(MOUNT_SETATTR, -1, path.encode(), flags, ctypes.byref(values), size)
    checked(done, f"mount_setattr of {path}")


def _show(path: str) -> None:
    old = f"/.old{path}"
    if path == "/" or os.path.lexists(path) or not os.path.lexists(old):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    mount(old, path, flags=MS_BIND | MS_REC)
    _read_only(path, AT_RECURSIVE)


def enter_job(folder_bytes: int) -> None:
    """A private /tmp of that size, and processes of its own for the children to come."""
    checked(libc().unshare(NEWPID | NEWNS), "unshare")
    options = f"size={folder_bytes},nr_inodes=4096,mode=700"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)


def own_proc() -> None:
    """A /proc that shows this job's processes only, or nothing where the kernel forbids one."""
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    except OSError:
        mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=0")


def die_with_parent(parent: int) -> None:
    libc().prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_reaper() -> None:
    """Descendants whose parents have died become this process's children."""
    libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def unreadable() -> None:
    """Other processes of this user can neither trace this one nor read its memory."""
    checked(libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def without_privileges() -> None:
    """Not even within the namespaces, and for good."""
    checked(libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(libc().capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def set_limits(cpu_s: int, memory_bytes: int, file_bytes: int, processes: int | None) -> None:
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 128),
    ]
    if processes is not None:
        limits.append((resource.RLIMIT_NPROC, processes))
    for kind, value in limits:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


REFUSED = (
    "socket.", "subprocess.", "os.system", "os.fork", "os.exec", "os.spawn", "os.posix_spawn",
    "os.kill", "signal.pthread_kill", "ctypes.", "os.chroot", "os.setxattr", "pty.", "syslog.",
    "resource.setrlimit", "resource.prlimit",
)  # fmt: skip
WRITES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "shutil.",
)  # fmt: skip


def refuse_by_audit(folder: str, readable: Sequence[str]) -> None:
    """What Python code may not do where there are no namespaces: sockets, processes, signals, and
    files outside `folder` (reading: outside `readable` too). It holds back Python code that goes
    through the interpreter, not machine code."""
    folder = os.path.realpath(folder)
    writable = (folder,)
    legible = (folder, "/dev", *(os.path.realpath(path) for path in readable))

    def within(path: Any, places: Sequence[str]) -> bool:
        if isinstance(path, int):
            return True
        full = os.path.realpath(os.fsdecode(path))
        return any(full == place or full.startswith(place + os.sep) for place in places)

    busy = False

    def hook(event: str, values: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy:  # what this hook itself does
            return
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is refused in the sandbox")
        if event not in ("open", "os.listdir", "os.scandir") and not event.startswith(WRITES):
            return
        busy = True
        try:
            if event == "open":
                path, mode, flags = values
                writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
                writes = writes or (isinstance(mode, str) and any(c in mode for c in "wax+"))
                allowed = path is None or within(path, writable if writes else legible)
            elif event in ("os.listdir", "os.scandir"):
                allowed = values[0] is None or within(values[0], legible)
            else:
                names = [v for v in values if isinstance(v, str | bytes)]
                allowed = all(within(name, writable) for name in names)
        finally:
            busy = False
        if not allowed:
            raise PermissionError(f"{event} of {values[0]!r} is refused in the sandbox")

    sys.addaudithook(hook)
