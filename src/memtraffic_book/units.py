"""Measured numbers with their units, and the rule by which a comparison leaves the numbers out.

A page prints a measured number with its unit, and with a unit of `UNITS`. On a GPU the number
differs from run to run, so there nbval compares the text around it and the unit alone.
"""

# A unit that follows its number after a space; the ratio's x follows at once.
UNITS = (
    *("GB/s", "TB/s", "TFLOP/s", "T/s", "FLOP/byte", "GHz"),
    *("per clock", "cycles"),
    *("ns", "µs", "ms", "kB", "MB", "GB", "%"),
)

# A number, up to a unit that no letter follows; and so many times, which is counted if it is whole.
MEASURED = rf"[+-]?\d[\d,]*(\.\d+)?(?=( ({'|'.join(UNITS)})|x)(?![\w/]))|\d+\.\d+(?= times\b)"


def sanitize_rule() -> str:
    """What nbval's option `--nbval-sanitize-with` reads: it replaces each measured number.

    A figure's height goes with it, because a number in its title decides where the title wraps.
    """
    number = f"[measured number]\nregex: {MEASURED}\nreplace: NUMBER\n"
    return number + "[figure]\nregex: (?<=<Figure size )[\\d.]+x[\\d.]+\nreplace: SIZE\n"


def format_ns(nanoseconds: float) -> str:
    """A duration in nanoseconds.

    >>> format_ns(352.297)
    '352 ns'
    """
    return f"{nanoseconds:,.0f} ns"


def format_us(microseconds: float) -> str:
    """A duration in microseconds.

    >>> format_us(5.04), format_us(101.4)
    ('5.0 µs', '101 µs')
    """
    return f"{microseconds:.1f} µs" if microseconds < 20 else f"{microseconds:,.0f} µs"


def format_gb_per_s(value: float) -> str:
    """A bandwidth in GB/s, 10**9 bytes per second.

    >>> format_gb_per_s(3957.2)
    '3957 GB/s'
    """
    return f"{value:.0f} GB/s"


def format_ratio(value: float) -> str:
    """A ratio.

    >>> format_ratio(1.034)
    '1.03x'
    """
    return f"{value:.2f}x"


def format_bytes(n_bytes: float) -> str:
    """An amount of memory in units of 1000 bytes.

    >>> format_bytes(268510464), format_bytes(16384)
    ('268.5 MB', '16.4 kB')
    """
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.1f} kB"


def format_percent(value: float) -> str:
    """A share or a change in percent.

    >>> format_percent(0.916)
    '91.6 %'
    """
    return f"{100 * value:.1f} %"


def format_share(value: float) -> str:
    """A share in whole percent, two digits for the prose.

    >>> format_share(0.748)
    '75 %'
    """
    return f"{100 * value:.0f} %"
