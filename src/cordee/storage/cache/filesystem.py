"""A dataset as an fsspec file system, for libraries that take one (pyarrow, pandas, datasets)."""

from typing import Any

from fsspec.spec import AbstractFileSystem

from cordee.storage.cache.dataset import PinnedData


class DataFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The objects of one dataset; read only.

    Args:
        data: the dataset.
    """

    protocol = "cordee-data"
    cachable = False

    def __init__(self, data: PinnedData, **options: Any) -> None:
        super().__init__(**options)
        self._data = data

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the entries of a folder, or of a file itself."""
        folder = self._strip_protocol(path).strip("/")
        start = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for pin in self._data.pins:
            if pin.name == folder:
                return [self._entry(pin.name, pin.size_bytes)] if detail else [pin.name]
            if pin.name.startswith(start):
                first, rest, _ = pin.name[len(start) :].partition("/")
                name = start + first
                found[name] = (
                    {"name": name, "size": 0, "type": "directory"} if rest else self._entry(name, pin.size_bytes)
                )
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    @staticmethod
    def _entry(name: str, size_bytes: int) -> dict[str, Any]:
        return {"name": name, "size": size_bytes, "type": "file"}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            raise ValueError(f"{mode!r}: a dataset is read only")
        name = self._strip_protocol(path).strip("/")
        if name not in list(self._data):
            raise FileNotFoundError(path)
        return self._data.open(name)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return bytes of a file; what is missing is fetched at once."""
        number = self._data.number(self._strip_protocol(path))
        size = self._data.pins[number].size_bytes
        first, stop, _ = slice(start, end).indices(size)
        self._data.ensure([(number, first, stop)])
        return self._data.read(number, first, stop)
