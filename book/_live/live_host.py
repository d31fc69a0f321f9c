"""Makes Brython, in the worker of a page, the host that live.py asks for.

The page sends a text and its options as JSON; each stage of the run goes back as JSON, then "null".
"""

import _sys
import javascript
import live

worker, math = javascript.this(), javascript.Math
# What Math returns is a number of JavaScript, which is no float of Python where it is whole.
live.MATH.update({name: lambda x, of=name: float(getattr(math, of)(x)) for name in live.HOSTED})
live.MATH["exp2"] = lambda x: float(math.pow(2, x))
live.MODULES = _sys.modules
live.FRAME["get"] = _sys._getframe


def send(message):
    worker.postMessage(javascript.JSON.stringify(message))


def answer(text, options):
    for stage in live.run(text, javascript.JSON.parse(options)):
        send(stage)
    send(None)


worker.answer = answer
send({"stage": "ready"})
