"""A lock that one program holds on a folder."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from bespoke.errors import UserError
from bespoke.files import write_error

LOCK = ".bespoke.lock"

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_MARK = "bespoke: "  # how our own lock files begin


def check_idle(folder: Path) -> None:
    """Refuse a folder in which a run is going on; nothing is written there, and the lock is not kept."""
    for path, how in ((folder / LOCK, os.O_NOFOLLOW | os.O_NONBLOCK), (folder, os.O_DIRECTORY)):
        try:
            descriptor = os.open(path, os.O_RDONLY | how)
        except OSError:
            continue  # nobody ever locked it
        try:
            if _is_locked(descriptor):
                raise _in_use(folder, descriptor)
        finally:
            os.close(descriptor)  # and the lock is gone


def _is_locked(descriptor: int) -> bool:
    """Return whether another process holds a lock, alone or with others, for longer than it takes to look."""
    for pause in (0.02, 0.1, 0.0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            time.sleep(pause)
        except OSError:
            return False  # there are no locks here
    return True


class InUse(UserError):
    """Another process holds the folder."""


def _in_use(folder: Path, descriptor: int) -> InUse:
    """Return the mistake of a folder that another process holds, whose name the lock's file has."""
    holder = (not _is_folder(descriptor) and _holder(descriptor)) or "of unknown name"
    return InUse(f"{folder} is in use by another process ({holder}): wait until it has ended, or choose another folder")


def _holder(descriptor: int) -> str:
    """Return who signed the lock's file; whoever took the lock this moment signs it in the next."""
    for pause in (0.02, 0.1, 0.5, 0.0):
        told = os.pread(descriptor, 300, 0).decode(errors="replace").partition("\n")[0].removeprefix(_MARK)
        if told:
            return told
        time.sleep(pause)
    return ""


def _is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


class FolderLock:
    """An operating system's lock on a folder, held until :meth:`close` or the end of the process.

    Several processes may hold it together: the first takes it alone and calls :meth:`share`, then the others join.
    Nobody can take it alone before all have let go. The folder itself is locked as well, where the file system can,
    since people remove lock files.
    """

    def __init__(self, folder: Path, *, join: bool = False) -> None:
        """Take the lock alone, or ``join`` those who share it; refuse at once if that is impossible."""
        self._path = folder / LOCK
        self.note = ""  # why there is no lock, where the file system has none
        self._descriptor = self._open(os.O_RDONLY if join else os.O_RDWR | os.O_CREAT)
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._closed = False
        try:
            self._flock(fcntl.LOCK_SH if join else fcntl.LOCK_EX)
            if not join:
                self._sign()
        except BaseException:
            self.close()
            raise

    def share(self) -> None:
        """Let other processes join; another program that takes the lock in between is told to be the holder."""
        self._flock(fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go, also for forked children that inherited the lock."""
        if not self._closed:
            self._closed = True
            for descriptor in (self._folder, self._descriptor):
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _open(self, how: int) -> int:
        """Open the lock's file, which must be ours or new, and no link; a later program does not inherit it."""
        try:
            descriptor = os.open(self._path, how | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise self._foreign() from None
            raise write_error(self._path, error) from error
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not plain or not _MARK.encode().startswith(os.pread(descriptor, len(_MARK), 0)):
            os.close(descriptor)
            raise self._foreign()
        return descriptor

    def _foreign(self) -> UserError:
        """Return the mistake of a folder where something else has the lock's name."""
        return UserError(f"{self._path} is not the lock of a run: move it away, or choose another folder")

    def _flock(self, how: int) -> None:
        """Take the lock in this way at once, or say who holds it; note it where there are no locks."""
        try:
            fcntl.flock(self._descriptor, how | fcntl.LOCK_NB)
            self._flock_folder(how)
        except BlockingIOError:
            raise _in_use(self._path.parent, self._descriptor) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise write_error(self._path, error) from error
            self.note = f"{self._path.parent} cannot be locked here: start no second run in it while this one goes on"

    def _flock_folder(self, how: int) -> None:
        """Lock the folder itself in the same way, if the file system can do that."""
        try:
            fcntl.flock(self._folder, how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass

    def _sign(self) -> None:
        """Write who holds the lock; for people, so that no room for it is no error."""
        text = f"{_MARK}host {socket.gethostname()}, pid {os.getpid()}\n".encode()
        try:
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))
        except OSError:
            pass
