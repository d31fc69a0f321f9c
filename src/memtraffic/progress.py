"""Progress of a long run, on stderr. Commands switch it on; in a notebook it would be part of the output."""

import sys
import time


class Progress:
    """Says how far a run is, at most five times a second, once it has taken two seconds."""

    enabled = False

    def __init__(self, label):
        self.label, self.next, self.spoke = label, time.monotonic() + 2, False

    def at(self, done, total):
        """`done` of `total` steps are done."""
        if self.enabled and time.monotonic() > self.next:
            print(
                f"\r{self.label}: {done} of {total} ",
                end="",
                file=sys.stderr,
                flush=True,
            )
            self.next, self.spoke = time.monotonic() + 0.2, True

    def end(self):
        """Ends the line, if there is one."""
        if self.spoke:
            print(file=sys.stderr)


def progress(items, label):
    """Yields `items` and says which one it is at."""
    items = list(items)
    bar = Progress(label)
    for done, item in enumerate(items):
        bar.at(done, len(items))
        yield item
    bar.end()
