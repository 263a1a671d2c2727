"""The files of a remote store, any that fsspec reaches, and its clients' errors in one sentence."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from kvprofile.errors import BadInput, KvprofileError


class Remote:
    """The root of a remote store.

    Raises:
        BadInput: From every method, if the place cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        if url.split("://")[0] in ("file", "local"):
            raise BadInput(f"{url} is a folder of this machine; give its path instead")
        with self._told():
            self._fs, self._root = url_to_fs(self.url)

    def place(self, name: str) -> str:
        """Returns the URL of something in the store."""
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{name}"

    def files(self, folder: str = "") -> dict[str, int]:
        """Returns the size of every file by its name in the store or a folder of it, in bytes; nothing where there are none."""
        root = self._path(folder) if folder else self._root
        with self._told():
            self._fs.invalidate_cache()
            try:
                found: Mapping[str, Any] = self._fs.find(root, detail=True)
            except FileNotFoundError:
                return {}
        start = len(root.rstrip("/")) + 1
        return {path[start:]: int(about.get("size") or 0) for path, about in found.items()}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file, None if it is not there."""
        with self._told():
            try:
                content: bytes = self._fs.cat_file(self._path(name))
                return content
            except FileNotFoundError:
                return None

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless it is there already; returns whether it did.

        NOTE: Only as safe as the service: S3, GCS and those like them decide between two writers, a plain file server may not.
        """
        with self._told():
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except OSError as error:
                # Other services than Amazon's do not say which condition failed, and s3fs then tells EINVAL.
                if not isinstance(error, FileExistsError) and error.errno != errno.EINVAL:
                    raise
            else:
                return True
        held = self.read(name)
        if held is None:
            raise BadInput(f"{self.place(name)} can be neither created nor read; check what the credentials allow")
        return held == content  # ours, if an answer got lost and the client asked again

    def upload(self, local: Path, name: str) -> None:
        """Copies a local file to the store."""
        with self._told():
            self._fs.put_file(str(local), self._path(name))

    def download(self, name: str, local: Path) -> None:
        """Copies a file of the store to a local one."""
        with self._told():
            self._fs.get_file(self._path(name), str(local))

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._told():
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what a client of any service may raise into one sentence."""
        try:
            yield
        except KvprofileError:
            raise
        except ImportError as error:
            raise BadInput(f"{self.url} needs a package ({error}); pip install 'kvprofile[s3]' for s3://") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise BadInput(
                f"{self.url} cannot be used ({reason}); check address, credentials, rights and network"
            ) from error
