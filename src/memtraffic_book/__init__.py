"""What only the pages of the book use: experiments and their recordings, text, tables, figures.

Nothing outside this package imports it. `figures`, which needs Matplotlib, and the other modules
are imported where a page asks for them: `from memtraffic_book import figures`.
"""

import memtraffic  # noqa: F401  # before Triton: it decides what runs the kernels
from memtraffic_book.recording import experiment, experiments
from memtraffic_book.text import check_exercise, claim, glue, show_diff, show_source

__all__ = [
    "check_exercise",
    "claim",
    "experiment",
    "experiments",
    "glue",
    "show_diff",
    "show_source",
]
