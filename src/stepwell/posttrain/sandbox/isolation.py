"""What a program may reach: Linux namespaces, or (where these are forbidden) Python's audit hook.

Runs in the sandbox's own processes: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
import types
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


def set_limits(cpu_s: int, memory_bytes: int, file_bytes: int, processes: int) -> None:
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_NPROC, processes),
    ]
    for kind, value in limits:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


REFUSED = (
    "socket.", "subprocess.", "os.system", "os.fork", "os.exec", "os.spawn", "os.posix_spawn",
    "os.kill", "signal.pthread_kill", "ctypes.", "os.chroot", "os.chdir", "os.fchdir",
    "os.setxattr", "pty.", "syslog.", "resource.setrlimit", "resource.prlimit",
)  # fmt: skip
WRITES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "shutil.",
)  # fmt: skip
# Where an event says which open folder a path is relative to.
FOLDERS = {
    "os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.symlink": 2, "os.chmod": 2, "os.chown": 3,
    "os.utime": 3, "os.rename": 2, "os.link": 2,
}  # fmt: skip
# They reach the system without an event.
UNHEARD_MODULES = ("_posixsubprocess", "ctypes", "_ctypes", "_ctypes_test", "_testcapi")
UNHEARD = (
    "mkfifo", "mknod", "unshare", "setns", "pidfd_open", "setuid", "setgid", "setresuid",
    "setresgid", "setreuid", "setregid", "seteuid", "setegid", "setgroups", "setpriority", "nice",
)  # fmt: skip
TWO_PATHS = ("os.rename", "os.link", "os.symlink")
SLACK = 64  # processes and threads that others of the same user may start meanwhile


def tasks_of_this_user() -> int:
    """Processes and threads, which is what RLIMIT_NPROC counts."""
    uid, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return count


def refuse_by_audit(folder: str, readable: Sequence[str]) -> None:
    """What Python code may not do where there are no namespaces: sockets, processes, signals, and
    files outside `folder` (reading: outside `readable` too). It holds back code that does not set
    out to escape; it is no security boundary."""
    folder = os.path.realpath(folder)
    writable = (folder,)
    legible = (folder, "/dev", *(os.path.realpath(path) for path in readable))
    realpath, is_folder, busy = os.path.realpath, os.path.isdir, threading.local()

    def plain(path: Any) -> Any:
        """Without the methods of a program's own class, which would run unheard."""
        if isinstance(path, str):
            return str.__str__(path)
        if isinstance(path, bytes):
            return os.fsdecode(bytes.__getitem__(path, slice(None)))
        return path if path is None or type(path) is int else ""

    def within(path: Any, places: Sequence[str]) -> bool:
        if isinstance(path, int) or path is None:
            return True
        full = realpath(path)
        inside = any(full == place or full.startswith(place + os.sep) for place in places)
        # An open folder could make the next path, which is seen without it, mean another place.
        climbs = not os.path.isabs(path) and ".." in path.split(os.sep)
        return bool(path) and inside and not climbs

    def is_allowed(event: str, values: tuple[Any, ...]) -> bool:
        if event == "open":
            path, mode, flags = plain(values[0]), values[1], values[2]
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            writes = writes or (isinstance(mode, str) and any(c in mode for c in "wax+"))
            # With a mode it is `io.open`, which keeps no folder open.
            if mode is None and isinstance(path, str) and is_folder(path):
                raise IsADirectoryError(f"a folder is refused in the sandbox: {path!r}")
            return within(path, writable if writes else legible)
        if event in ("os.listdir", "os.scandir"):
            return within(plain(values[0]), legible)
        after = FOLDERS.get(event)
        if after is not None and any(fd not in (-1, None) for fd in values[after:]):
            return False
        names = values if after is None else values[: 2 if event in TWO_PATHS else 1]
        names = [v for v in names if v is not None and not isinstance(v, int | float | tuple)]
        return all(within(plain(name), writable) for name in names if not callable(name))

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if getattr(busy, "now", False):  # what this hook itself does
            return
        if event == "import" and str.__str__(values[0]).rpartition(".")[2] in UNHEARD_MODULES:
            raise ImportError(f"{values[0]} is refused in the sandbox")
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is refused in the sandbox")
        if event not in ("open", "os.listdir", "os.scandir") and not event.startswith(WRITES):
            return
        # These are a program's own methods, and heard.
        values = tuple(os.fspath(v) if isinstance(v, os.PathLike) else v for v in values)
        busy.now = True
        try:
            allowed = is_allowed(event, values)
        finally:
            busy.now = False
        if not allowed:
            raise PermissionError(f"{event} of {plain(values[0])!r} is refused in the sandbox")

    _take_away()
    sys.addaudithook(hook)


def _take_away() -> None:
    """What raises no event. `subprocess` can still be imported (asyncio does), and starts none."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("processes are refused in the sandbox")

    for name in list(sys.modules):
        if name.partition(".")[0] in UNHEARD_MODULES:
            del sys.modules[name]
    globals().pop("ctypes", None)
    stub = types.ModuleType("_posixsubprocess")
    stub.fork_exec = refuse  # type: ignore[attr-defined]
    sys.modules["_posixsubprocess"] = stub
    started = sys.modules.get("subprocess")
    if started is not None:
        started._fork_exec = refuse  # type: ignore[attr-defined]
    # Folders cannot be opened.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    for name in UNHEARD:
        for module in (os, sys.modules["posix"]):
            if hasattr(module, name):
                delattr(module, name)
