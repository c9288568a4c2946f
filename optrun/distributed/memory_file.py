"""Files in memory that processes of one machine share; they vanish with the last process."""

import os
from pathlib import Path


class MemoryFile:
    """A file without a name on any disk; Linux only.

    Other processes of the same user open it by `path`, as long as this process keeps it open.
    SIGKILL leaves nothing behind: the kernel frees it when the last process closes it.

    Args:
        name: Shown by the system's tools.
    """

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)

    @property
    def path(self) -> Path:
        """Where other processes open it."""
        return Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")

    def write_text(self, text: str) -> None:
        """Replace its content."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)

    def close(self) -> None:
        """Close it here; processes that have opened it keep it."""
        os.close(self.descriptor)


def read_text(path: Path) -> str:
    """Read the text of another process's memory file.

    Raises:
        OSError: That process has ended, or has closed the file.
    """
    return path.read_text(encoding="utf-8", errors="replace")
