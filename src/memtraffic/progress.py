"""Progress of a long run, on stderr; a short one stays silent."""

import sys
import time


def progress(items, label, after=2.0):
    """Yields `items`; once `after` seconds have passed, says on stderr which one it is at."""
    items = list(items)
    start, spoke = time.monotonic(), False
    for number, item in enumerate(items, 1):
        if time.monotonic() - start > after:
            print(f"\r{label}: {number} of {len(items)}", end="", file=sys.stderr, flush=True)
            spoke = True
        yield item
    if spoke:
        print(file=sys.stderr)
