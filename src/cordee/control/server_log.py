"""The log of the server process, a file in its home: JSON, a line an event, or text for people."""

import logging
from collections.abc import Mapping
from pathlib import Path

import structlog

from cordee.control.home import Home
from cordee.errors import InputError

_RENDERERS: Mapping[str, structlog.typing.Processor] = {
    "json": structlog.processors.JSONRenderer(),
    "text": structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
}


def log_format(home: Home, wanted: str | None) -> str:
    """Return the format of a server's log, by default that of the last `up`.

    Raises:
        InputError: there is none of that name.
    """
    found = home.settings().get("log_format", "json") if wanted is None else wanted
    if found not in _RENDERERS:
        raise InputError(f"{found!r} is not a format of the server's log", hint="write --log-format json, or text")
    home.keep_settings({"log_format": found})
    return found


def log_to(path: Path, form: str = "json") -> None:
    """Write everything that this process logs, through structlog or not, to one file."""
    common: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Text shows tracebacks by itself.
    common += [structlog.processors.format_exc_info] if form == "json" else []
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    render = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, _RENDERERS[form]]
    handler = logging.FileHandler(path)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=common, processors=render))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
