"""Where compiled kernels are kept between processes.

numba's own choice fails where neither the package nor the home can be written, and takes a file's date and length for
its content. Here the folder is named by a hash of the kernels' source.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import stat
import tempfile
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}}
_LOCK = threading.Lock()  # numba's folder is a setting of the process; it is changed only inside


def jit(function: F) -> F:
    """numba.njit without the GIL, cached on disk where a folder can be written."""
    import numba

    return cast(F, _cached(lambda cache: numba.njit(nogil=True, cache=cache, **OPTIONS)(function)))


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """numba.cfunc, cached alike: compiled now, with an `address`."""
    import numba

    return _cached(lambda cache: numba.cfunc(signature, cache=cache, **OPTIONS)(function))


def _cached(compile_with: Callable[[bool], Any]) -> Any:
    import numba

    folder = cache_folder()
    if folder is None:
        return compile_with(False)
    with _LOCK:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            return compile_with(True)
        finally:
            numba.config.CACHE_DIR = before


@functools.cache
def cache_folder() -> pathlib.Path | None:
    """The first of NUMBA_CACHE_DIR, the user's cache and the temporary folder that can be written; None if none can.

    Only a folder that no other user can write is taken: what lies there is executed.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    roots = [os.environ.get("NUMBA_CACHE_DIR"), os.path.join(home, "gpuqueue"), _temporary()]
    folders = [pathlib.Path(root) / f"kernels-{source_hash()}" for root in roots if root]
    return next(filter(_is_private, folders), None)


def _temporary() -> str | None:
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    try:
        return os.path.join(tempfile.gettempdir(), f"gpuqueue-{owner}")
    except OSError:
        return None


def source_hash() -> str:
    """A hash of the source that is compiled."""
    here = pathlib.Path(__file__).parent
    names = ("numba_cache.py", "numba_instructions.py", "numba_readers.py", "numba_kernels.py", "contract.py")
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in names)).hexdigest()[:16]


def _is_private(folder: pathlib.Path) -> bool:
    """Makes the folder; whether it can be written, by this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        state = folder.stat()
    except OSError:
        return False
    return not hasattr(os, "getuid") or (
        state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    )
