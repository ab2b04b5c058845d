"""Quantities at the edge: parse `80GB`, `3d12h`, `400Gbps`; format bytes, seconds and dollars for people.

Inside the code every quantity is in base units, with the unit in its name.
"""

import math
import re
from functools import lru_cache

from cordee.errors import UnitError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

US_PER_S = 1_000_000
US_PER_HOUR = 3_600 * US_PER_S
US_PER_DAY = 24 * US_PER_HOUR
MICRO_USD = 1_000_000

_BYTES = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "PB": 10**15}
_BYTES |= {"KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}
_BITS_PER_S = {"bps": 1, "Kbps": 10**3, "Mbps": 10**6, "Gbps": 10**9, "Tbps": 10**12}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_bytes(text: str) -> int:
    """Return the bytes of `80GB` (10^9) or `80GiB` (2^30).

    >>> parse_bytes("80GB"), parse_bytes("1.5 GiB")
    (80000000000, 1610612736)

    Raises:
        UnitError: a bare number, a negative one, an unknown unit, or bits (`80Gb`).
    """
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z]+)", text.strip())
    if match and re.fullmatch(r"[KMGTP]i?b", match[2]):
        raise UnitError(
            f"{text!r} is a number of bits", hint=f"write bytes with a capital B: {match[1]}{match[2][:-1]}B"
        )
    if not match or match[2].upper() not in _BYTES:
        raise UnitError(f"{text!r} is not a size", hint="write a number with a unit: 80GB (10^9) or 80GiB (2^30)")
    return round(float(match[1]) * _BYTES[match[2].upper()])


def parse_duration_s(text: str) -> float:
    """Return the seconds of `90s`, `30m` or `3d12h`.

    >>> parse_duration_s("3d12h"), parse_duration_s("1.5m"), parse_duration_s("250ms")
    (302400.0, 90.0, 0.25)

    Raises:
        UnitError: a bare number or an unknown unit.
    """
    compact = text.replace(" ", "")
    parts = re.findall(_NUMBER + r"(ms|[smhdw])", compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise UnitError(f"{text!r} is not a duration", hint="write a number with a unit: 90s, 30m, 47h or 3d12h")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_latency_s(text: str) -> float:
    """Return the seconds of `500ms` or `2s`; as `parse_duration_s`, with a hint for short times.

    >>> parse_latency_s("500ms"), parse_latency_s("2s")
    (0.5, 2.0)

    Raises:
        UnitError: a bare number or an unknown unit.
    """
    try:
        return parse_duration_s(text)
    except UnitError as error:
        raise UnitError(error.message, hint="write a number with a unit: 500ms or 2s") from None


def parse_bytes_per_s(text: str) -> float:
    """Return the bytes per second of `400Gbps` (bits) or `3.35TB/s` (bytes).

    >>> parse_bytes_per_s("400Gbps"), parse_bytes_per_s("2GB/s")
    (50000000000.0, 2000000000.0)

    Raises:
        UnitError: a bare number or an unknown unit.
    """
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z]+)", text.strip())
    if match and match[2] in _BITS_PER_S:
        return float(match[1]) * _BITS_PER_S[match[2]] / 8
    if text.strip().endswith("/s"):
        return float(parse_bytes(text.strip().removesuffix("/s")))
    raise UnitError(f"{text!r} is not a bandwidth", hint="write 400Gbps (bits) or 50GB/s (bytes)")


def parse_rate_per_s(text: str) -> float:
    """Return the events per second of `5/s`, `300/m` or `2000/h`.

    >>> parse_rate_per_s("5/s"), parse_rate_per_s("90/m")
    (5.0, 1.5)

    Raises:
        UnitError: a bare number or an unknown unit.
    """
    match = re.fullmatch(_NUMBER + r"\s*/\s*(s|m|h|d)", text.strip())
    if match is None:
        raise UnitError(f"{text!r} is not a rate", hint="write a number with a unit: 5/s, 300/m or 2000/h")
    return float(match[1]) / _SECONDS[match[2]]


def parse_token_count(text: str) -> int:
    """Return the tokens of `16384`, `32k` (32,000) or `32K` (32,768), as vLLM reads them.

    >>> parse_token_count("16384"), parse_token_count("32k"), parse_token_count("32K")
    (16384, 32000, 32768)

    Raises:
        UnitError: not a whole number of tokens, or none.
    """
    match = re.fullmatch(r"(\d+)\s*([kK]?)", text.strip().replace(",", ""))
    if match is None or int(match[1]) == 0:
        raise UnitError(f"{text!r} is not a number of tokens", hint="write 16384, 32k (32,000) or 32K (32,768)")
    return int(match[1]) * {"": 1, "k": 1000, "K": 1024}[match[2]]


def parse_micro_usd(text: str) -> int:
    """Return the integer micro-dollars of `$12.50` or `12.50usd`.

    >>> parse_micro_usd("$2.99")
    2990000

    Raises:
        UnitError: no currency, or not a number.
    """
    match = re.fullmatch(r"\$" + _NUMBER + "|" + _NUMBER + r"\s*(?:usd|USD)", text.strip().replace(",", ""))
    if not match:
        raise UnitError(f"{text!r} is not an amount of money", hint="write $500 or 500usd")
    return round(float(match[1] or match[2]) * MICRO_USD)


def parse_micro_usd_per_hour(text: str) -> int:
    """Return the integer micro-dollars an hour of `$12.50/h`.

    >>> parse_micro_usd_per_hour("$2.99/h")
    2990000

    Raises:
        UnitError: no amount of money, or not one an hour.
    """
    amount, slash, time = text.strip().rpartition("/")
    if slash and time.strip() in ("h", "hour"):
        return parse_micro_usd(amount)
    raise UnitError(f"{text!r} is not a price", hint="write dollars an hour: $12/h")


def format_bytes(n_bytes: float) -> str:
    """Format bytes in decimal units, as vendors and bills do.

    >>> format_bytes(1_128_859_303_936), format_bytes(80 * GB), format_bytes(512)
    ('1.129 TB', '80 GB', '512 B')
    """
    sign, size = ("-", -n_bytes) if n_bytes < 0 else ("", n_bytes)
    for name, unit in (("PB", 10**15), ("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB)):
        if size >= unit:
            digits = 3 if size < 10 * unit else 1
            return f"{sign}{_trim(size / unit, digits)} {name}"
    return f"{sign}{size:.0f} B"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units.

    >>> format_duration(169_200), format_duration(131), format_duration(0.0057), format_duration(12.34)
    ('47h', '2m11s', '5.7 ms', '12.3 s')
    """
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 1:
        return f"{_trim(seconds * 1000, 1)} ms"
    if seconds < 60:
        return f"{_trim(seconds, 1)} s"
    whole = round(seconds)
    days, hours = divmod(whole, 86400)
    if days >= 4:
        return f"{days}d{hours // 3600}h" if hours >= 3600 else f"{days}d"
    if whole >= 3600:
        return f"{whole // 3600}h" + (f"{whole % 3600 // 60}m" if whole % 3600 >= 60 else "")
    return f"{whole // 60}m" + (f"{whole % 60}s" if whole % 60 else "")


def format_latency(seconds: float) -> str:
    """Format a latency in milliseconds, or in seconds from one on.

    >>> format_latency(0.0123), format_latency(0.5), format_latency(75.0)
    ('12.3 ms', '500 ms', '75.00 s')
    """
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def format_micro_usd(micro_usd: int) -> str:
    """Format micro-dollars as dollars, with more digits for small amounts.

    >>> format_micro_usd(8_993_920_000), format_micro_usd(2_990_000), format_micro_usd(1_234)
    ('$8,994', '$2.99', '$0.001234')
    """
    usd = micro_usd / MICRO_USD
    size = abs(usd)
    sign = "-" if usd < 0 else ""
    if size == 0 or size >= 1000:
        return f"{sign}${size:,.0f}"
    if size >= 0.1:
        return f"{sign}${size:,.2f}"
    return f"{sign}${size:.{max(2, 3 - math.floor(math.log10(size)))}f}"


def format_usd(usd: float) -> str:
    """Format dollars as `format_micro_usd` does.

    >>> format_usd(8993.92)
    '$8,994'
    """
    return format_micro_usd(round(usd * MICRO_USD))


def format_gb(n_bytes: float) -> str:
    """Format gigabytes with one decimal, as one unit for a whole column.

    >>> format_gb(73_240_000_000)
    '73.2 GB'
    """
    return f"{n_bytes / GB:.1f} GB"


def format_kg(kg: float) -> str:
    """Format kilograms, as tonnes from 10,000 on.

    >>> format_kg(0.2031), format_kg(812.4), format_kg(53_400)
    ('0.203 kg', '812 kg', '53.4 t')
    """
    if kg >= 10_000:
        return f"{kg / 1000:,.1f} t"
    return f"{kg:,.0f} kg" if kg >= 100 else f"{kg:.3g} kg"


def format_whole_usd(usd: float) -> str:
    """Format dollars, without cents from 100 on, for a column of comparable amounts.

    >>> format_whole_usd(134.56), format_whole_usd(2.99)
    ('$135', '$2.99')
    """
    return f"${usd:,.0f}" if usd >= 100 else format_usd(usd)


def format_digits_usd(usd: float) -> str:
    """Format dollars with three digits, for a column whose amounts differ by orders of magnitude.

    >>> format_digits_usd(0.03461), format_digits_usd(1.335), format_digits_usd(2_500)
    ('$0.0346', '$1.33', '$2,500')
    """
    if usd >= 100:
        return f"${usd:,.0f}"
    return f"${usd:.{max(0, 2 - math.floor(math.log10(usd)))}f}" if usd > 0 else "$0"


def format_count(number: float) -> str:
    """Format a number with three digits.

    >>> format_count(4_194_304), format_count(3e11), format_count(1.4e12), format_count(12)
    ('4.19M', '300B', '1.4T', '12')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def plural(number: int, noun: str, many: str = "") -> str:
    """Return a number of things in words; `many` is an irregular plural.

    >>> plural(1, "rank"), plural(1_200, "rank"), plural(2, "copy", "copies")
    ('1 rank', '1,200 ranks', '2 copies')
    """
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def _trim(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def month_start_us(at_us: int) -> int:
    """Return the start of a time's month of UTC.

    >>> month_start_us(1_709_251_199_000_000) == 1_706_745_600_000_000  # the last second of 29 February 2024
    True
    """
    day = at_us // US_PER_DAY
    return (day - _date(day)[2]) * US_PER_DAY


def format_month(at_us: int) -> str:
    """Return a time's month of UTC.

    >>> format_month(1_709_251_199_000_000), format_month(0)
    ('2024-02', '1970-01')
    """
    year, month, _ = _date(at_us // US_PER_DAY)
    return f"{year:04}-{month:02}"


@lru_cache(maxsize=64)
def _date(day: int) -> tuple[int, int, int]:
    """Return the year and the month of a day since 1970, and the days since the month's start."""
    eras, of_era = divmod(day + 719_468, 146_097)  # since a 1 March of a year divisible by 400
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    from_march = (5 * of_year + 2) // 153
    is_next = from_march > 9  # January and February are the last months of a year that begins in March
    return 400 * eras + year + is_next, from_march + (-9 if is_next else 3), of_year - (153 * from_march + 2) // 5
