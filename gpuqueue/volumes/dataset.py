"""Volumes of a data set by their files: which there are, and how one is read."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.reading import read, read_channels, read_header
from gpuqueue.volumes.volume import Volume, find_role

Paths = str | list[str]
_NIFTI = re.compile(r"\.(nii(\.gz)?|hdr|mgh|mgz)$", re.IGNORECASE)


class VolumeDataset:
    """A map-style dataset of volumes read from files that nibabel knows.

    Args:
        entries: One dict a volume: `"id"` (default: the name of its first file) and one path for each key; a list of
            paths is one channel each. All entries have the same keys.
        transform: `Volume -> Volume`, run in the worker after reading; a fixed step such as cropping to the body.
        roles, same_grid: As for `Volume`.

    Raises:
        ValueError: No entries, ids that occur twice, keys that differ between entries or have no role.

    >>> dataset = VolumeDataset([{"id": "a", "image": "a.nii.gz", "label": "a_seg.nii.gz"}])
    >>> len(dataset), dataset.ids
    (1, ['a'])
    """

    def __init__(
        self,
        entries: Iterable[Mapping[str, Any]],
        transform: Callable[[Volume], Volume] | None = None,
        roles: Mapping[str, str] | None = None,
        same_grid: bool | float = True,
    ) -> None:
        self.transform, self.same_grid = transform, same_grid
        self.roles = dict(roles or {})
        self._entries = _FlatList([_plain_entry(entry, number) for number, entry in enumerate(entries)])
        self._check(self.roles)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Volume:
        entry = self._entries[index]
        volume_id = entry.pop("id")
        arrays, affines, scale, sources = {}, {}, {}, {}
        for key, paths in entry.items():
            sources[key] = paths if isinstance(paths, str) else ", ".join(paths)
            where, role = f"volume {volume_id!r}, key {key!r}", find_role(key, self.roles, f"volume {volume_id!r}")
            stored = read(paths, role, where) if isinstance(paths, str) else read_channels(paths, role, where)
            arrays[key], affines[key], scale[key] = stored.data, stored.affine, stored.scale
        volume = Volume(volume_id, arrays, affines, self.roles, self.same_grid, scale=scale, sources=sources)
        return volume if self.transform is None else self.transform(volume)

    @property
    def ids(self) -> list[str]:
        """The volumes' ids, in order."""
        return [entry["id"] for entry in self._entries]

    def reference_grid(self, index: int) -> Grid | None:
        """The grid patches will be cut from, from the file's header alone; None where a transform may change it."""
        if self.transform is not None:
            return None
        entry = self._entries[index]
        volume_id = entry.pop("id")
        roles = {key: find_role(key, self.roles, volume_id) for key in entry}
        key = next((key for key, role in roles.items() if role == "image"), next(iter(entry)))
        path = entry[key] if isinstance(entry[key], str) else entry[key][0]
        header = read_header(path, roles[key])
        return Grid(header.shape, header.affine)

    def subset(self, ids: Iterable[str]) -> VolumeDataset:
        """The volumes of `ids`, in that order; ValueError for an id that is not there."""
        places = {volume_id: index for index, volume_id in enumerate(self.ids)}
        ids = list(ids)
        if unknown := [volume_id for volume_id in ids if volume_id not in places]:
            raise ValueError(f"subset: no volume has the id {unknown[0]!r}; ids look like {list(places)[:3]}")
        return VolumeDataset(
            [self._entries[places[volume_id]] for volume_id in ids], self.transform, self.roles, self.same_grid
        )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], **options: Any) -> VolumeDataset:
        """The volumes of a folder, with keys `image` and, where there are labels, `label`.

        Layouts: the Medical Segmentation Decathlon's and nnU-Net's (`imagesTr`, `labelsTr`; with `dataset.json` naming
        channels, or files that all end in four digits, `case_0000`, `case_0001` are channels of one case), and pairs
        `NAME_image.nii.gz`, `NAME_label.nii.gz`. Hidden files (`._NAME`) are left out. `options` go to the class.

        Raises:
            ValueError: The folder holds neither layout, or some cases have labels and others none.
        """
        root = pathlib.Path(folder)
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder")
        return cls(_decathlon(root) if (root / "imagesTr").is_dir() else _pairs(root), **options)

    def _check(self, roles: Mapping[str, str]) -> None:
        if not len(self):
            raise ValueError(
                "the dataset is empty: give at least one entry such as {'id': 'case1', 'image': 'a.nii.gz'}"
            )
        keys: list[str] | None = None
        seen: set[str] = set()
        for entry in self._entries:
            volume_id = entry.pop("id")
            if volume_id in seen:
                raise ValueError(f"the id {volume_id!r} occurs twice; ids must be unique in a dataset")
            seen.add(volume_id)
            if keys is None:
                keys = list(entry)
                for key in keys:
                    find_role(key, roles, f"volume {volume_id!r}")
            if set(entry) != set(keys):
                raise ValueError(f"volume {volume_id!r} has the keys {sorted(entry)}, others have {sorted(keys)}")


class _FlatList:
    """A list of small dicts as one block of bytes: forked workers that read it copy no pages (reference counts of
    Python objects would)."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        texts = [json.dumps(item).encode() for item in items]
        self._ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(texts), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} volumes")
        start = self._ends[index - 1] if index else 0
        item: dict[str, Any] = json.loads(self._bytes[start : self._ends[index]].tobytes())
        return item


def _plain_entry(entry: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The entry with paths as text and its id first."""
    plain: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "id":
            continue
        paths = [value] if isinstance(value, (str, os.PathLike)) else value
        if not isinstance(paths, Sequence) or not paths or not all(isinstance(p, (str, os.PathLike)) for p in paths):
            raise ValueError(f"entry {number}: {key!r} must be a path or a list of paths, got {value!r}")
        plain[key] = os.fspath(value) if isinstance(value, (str, os.PathLike)) else [os.fspath(path) for path in value]
    if not plain:
        raise ValueError(f"entry {number} names no file: {dict(entry)}; write {{'id': 'case1', 'image': 'a.nii.gz'}}")
    first = next(iter(plain.values()))
    return {"id": str(entry.get("id", _stem(first if isinstance(first, str) else first[0])))} | plain


def _stem(path: str) -> str:
    return _NIFTI.sub("", os.path.basename(path))


def _volume_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Stem -> file of every volume in a folder; hidden files are left out and a .hdr/.img pair counts once."""
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and _NIFTI.search(path.name)]
    return {_stem(path.name): path for path in files}


def _with_labels(
    images: Mapping[str, Any], labels: Mapping[str, pathlib.Path], root: pathlib.Path
) -> list[dict[str, Any]]:
    if not images:
        raise ValueError(
            f"{root} holds no volumes in a known layout: imagesTr/ and labelsTr/, or NAME_image.nii.gz and "
            "NAME_label.nii.gz; or list the files yourself in VolumeDataset([...])"
        )
    if labels and (missing := sorted(set(images) - set(labels))):
        raise ValueError(f"{root}: {len(missing)} of {len(images)} cases have no label, the first is {missing[0]!r}")
    return [
        {"id": case, "image": image} | ({"label": labels[case]} if labels else {}) for case, image in images.items()
    ]


def _decathlon(root: pathlib.Path) -> list[dict[str, Any]]:
    images = _volume_files(root / "imagesTr")
    labels = _volume_files(root / "labelsTr") if (root / "labelsTr").is_dir() else {}
    description: dict[str, Any] = {}
    if (root / "dataset.json").is_file():
        try:
            description = json.loads((root / "dataset.json").read_text())
        except ValueError as error:
            raise ValueError(f"{root / 'dataset.json'} is no valid JSON: {error}") from error
    plain = set(images) <= set(labels) if labels else "channel_names" not in description
    if plain or not all(re.search(r"_\d{4}$", stem) for stem in images):
        return _with_labels(images, labels, root)
    cases: dict[str, list[pathlib.Path]] = {}
    for stem, path in images.items():  # sorted, so channels come in order
        cases.setdefault(re.sub(r"_\d{4}$", "", stem), []).append(path)
    return _with_labels(cases, labels, root)


def _pairs(root: pathlib.Path) -> list[dict[str, Any]]:
    files = _volume_files(root)
    images = {stem.removesuffix("_image"): path for stem, path in files.items() if stem.endswith("_image")}
    labels = {stem.removesuffix("_label"): path for stem, path in files.items() if stem.endswith("_label")}
    return _with_labels(images, labels, root)
