"""The CPU time that a container may use, which neither torch nor the number of cores shows."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """Return how many cores' time the cgroups of this process allow, or None for no limit.

    A limit of a group holds for the groups in it too, so the lowest one counts.

    Args:
        cgroups: Where the file system of cgroups is mounted.
        own: The file that lists the cgroups of the process.
    """
    return min((quota for folder in _folders(cgroups, own) if (quota := _quota(folder)) is not None), default=None)


def _folders(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the groups of the process that may limit its CPU time, and of the groups around them."""
    for line in _read(own).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has one hierarchy without a name; version 1 one for each controller, named by all of its names.
        mounts = {controllers, "cpu"} if controllers else {"", "unified"}
        # In a container, the path may be that of the host, and its own group be mounted as the root.
        for mount in mounts:
            for path in (PurePosixPath(group), *PurePosixPath(group).parents):
                yield cgroups / mount / str(path).lstrip("/")


def _quota(folder: Path) -> float | None:
    """Return the limit of one group in cores: `cpu.max` of version 2, or the two files of version 1."""
    numbers = _read(folder / "cpu.max").split()
    if not numbers:
        numbers = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or not int(numbers[1]):
        return None  # "max" and -1 are no limit
    return int(numbers[0]) / int(numbers[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
