"""The options that a server is started with, and what those that are left out were at the last start."""

from dataclasses import dataclass
from pathlib import Path

from cordee.control.engines.choice import LOCAL, check_engine
from cordee.control.home import SQLITE, Home
from cordee.control.patience import DEFAULT, parse_patience
from cordee.control.store.database import check_database, count_jobs
from cordee.errors import HomeUnsuitableError, InputError
from cordee.hardware.load import load_home
from cordee.units import plural


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `cordee up`; None: as for the last one."""

    slots: str | None = None
    price_as: str | None = None
    listen: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    database: str | None = None
    standby: bool = False
    on: str | None = None
    lease: str | None = None
    gateway: str | None = None
    log_format: str | None = None
    patience: str | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The machines, their GPUs or CPU slots, and the patience of their jobs; None: the default one.

    `price_as` names the GPU that sets the price of a slot.
    """

    slots: int | None
    price_as: str | None
    on: str = LOCAL
    patience: float | None = None

    @classmethod
    def of(
        cls, home: Home, slots: str | None, price_as: str | None, on: str | None = None, patience: str | None = None
    ) -> "Offer":
        """Return the offer of these options; an option that is not given is that of the last `up`.

        Raises:
            InputError: `slots` or `patience` is not a number, or no engine is called `on`.
            CatalogueError: the GPU is unknown.
            MissingExtraError: the engine's library is not installed.
        """
        last = home.settings()
        slots = last.get("slots", "auto") if slots is None else slots
        price_as = last.get("price_as", "none") if price_as is None else price_as
        on = last.get("on", LOCAL) if on is None else on
        check_engine(on)
        if slots != "auto" and not (slots.isdecimal() and int(slots) > 0):
            raise InputError(f"{slots!r} is not a number of CPU slots", hint="write --slots 8, or --slots auto")
        if price_as != "none":
            load_home(home.path).find_gpu(price_as)
        patience = last.get("patience", DEFAULT) if patience is None else patience
        patient = parse_patience(patience)
        home.keep_settings({"slots": slots, "price_as": price_as, "on": on, "patience": patience})
        return cls(None if slots == "auto" else int(slots), None if price_as == "none" else price_as, on, patient)


def database_of(home: Home, options: Options) -> str | None:
    """Return the URL of the PostgreSQL of these options, by default that of the last `up`; None: SQLite in the home.

    Raises:
        InputError: it is none, or a standby has none.
        HomeUnsuitableError: the home has jobs in SQLite, which would be out of sight.
    """
    url = options.database or home.settings().get("database", SQLITE)
    if url == SQLITE:
        if options.standby:
            raise InputError(
                "a standby needs a database that both servers reach",
                hint="cordee up --standby --database postgresql://USER@HOST/DATABASE",
            )
    else:
        check_database(url)
        own = home.path / "cordee.db"
        if own.exists() and (jobs := count_jobs(f"sqlite:///{own}")):
            raise HomeUnsuitableError(
                f"{own} has the log of {plural(jobs, 'job')}, which another database would hide",
                hint="take it to a new home: cordee admin backup FILE, then cordee admin restore FILE --home NEW"
                " --database URL; or move the file away to begin anew",
            )
    home.keep_settings({"database": url})
    return None if url == SQLITE else url
