"""Parquet: a row is a sample, and its row group is read and decoded as a whole."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from cordee.errors import DataDamagedError, MissingExtraError
from cordee.storage.cache.dataset import PinnedData, Span
from cordee.storage.cache.samples import Located, Samples

_DECODED_MAX = 8


class ParquetSamples(Samples):
    """Rows of Parquet files: dicts of columns.

    The row groups of the last samples stay decoded: an order that stays near its last sample reads each of them once.
    """

    def __init__(self, data: PinnedData, decode: Callable[[Any], Any] | None = None) -> None:
        super().__init__(data, decode)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtraError(
                f"{data.url} has Parquet files, and pyarrow is not installed", hint="pip install pyarrow"
            ) from error
        self._groups: list[tuple[int, int, int, int]] = []  # object, row group, first byte, the one behind the last
        counts = []
        for number, pin in enumerate(data.pins):
            if not pin.name.endswith(".parquet"):
                continue
            try:
                footer = pyarrow.parquet.read_metadata(data.open(pin.name))
            except (pyarrow.ArrowException, OSError) as error:
                raise DataDamagedError(
                    f"{pin.where} is no Parquet file: {error}", hint="it is damaged in its store: write it again"
                ) from error
            for each in range(footer.num_row_groups):
                self._groups.append((number, each, *_bytes_of(footer.row_group(each))))
                counts.append(footer.row_group(each).num_rows)
        self._located = Located(counts)
        self._decoded: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Return it without what is decoded."""
        return {**super().__getstate__(), "_decoded": OrderedDict()}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._located)

    @property
    def counts(self) -> Sequence[int]:
        """The number of rows in each row group."""
        return self._located.counts

    def span(self, index: int) -> Span:
        """Return the bytes of the row group."""
        number, _, start, stop = self._groups[self._located.place(index)[0]]
        return number, start, stop

    def parse(self, index: int, found: bytes) -> Any:
        """Return the row."""
        at, row = self._located.place(index)
        if at not in self._decoded:
            import pyarrow.parquet

            number, group, _, _ = self._groups[at]
            file = pyarrow.parquet.ParquetFile(self.data.open(self.data.pins[number].name))
            self._decoded[at] = file.read_row_group(group).to_pylist()
            if len(self._decoded) > _DECODED_MAX:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(at)
        return self._decoded[at][row]


def _bytes_of(group: Any) -> tuple[int, int]:
    columns = [group.column(each) for each in range(group.num_columns)]
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    return min(starts), max(ends)
