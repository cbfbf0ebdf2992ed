"""Folders whose files are symbolic links, as in the cache of a hub, of DVC and of git-annex."""

from pathlib import Path


def as_links(folder: Path, blobs: Path) -> Path:
    """Move every file of a folder to ``blobs``, with a link in its place; return the folder."""
    blobs.mkdir()
    for number, path in enumerate(sorted(each for each in folder.rglob("*") if each.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    return folder
