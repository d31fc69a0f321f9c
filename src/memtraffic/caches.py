"""Where Triton and Matplotlib keep files, on a machine whose home folder cannot be written."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

# The folder below home, by the variables that name another one.
CACHES = {("TRITON_CACHE_DIR", "TRITON_HOME"): ".triton", ("MPLCONFIGDIR",): ".config/matplotlib"}


def keep_writable() -> None:
    """Names a temporary folder for each cache that cannot be written, also to child processes.

    It is removed when this process ends. Says so once, by a warning of the logger `memtraffic`.
    """
    home = Path(os.path.expanduser("~"))
    asked = {names: folder for names, folder in CACHES.items() if not {*names} & {*os.environ}}
    missing = [names[0] for names, folder in asked.items() if not _can_be_written(home / folder)]
    if not missing:
        return
    temporary = tempfile.mkdtemp(prefix="memtraffic-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    os.environ |= {name: os.path.join(temporary, name.lower()) for name in missing}
    why = f"{home} cannot be written, so caches are kept in {temporary} until this process ends"
    logging.getLogger("memtraffic").warning("%s: set %s to keep them", why, " and ".join(missing))


def _can_be_written(folder: Path) -> bool:
    """Whether files can be made in a folder, which may have to be made first."""
    there = next(it for it in (folder, *folder.parents) if it.exists())
    with suppress(OSError), tempfile.TemporaryFile(dir=there):
        return True
    return False
