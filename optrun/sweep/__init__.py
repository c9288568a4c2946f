"""Many jobs as one set: found by what they are, done once, whatever ends. Called, it is `optrun.api.sweep`."""

import sys

from optrun.rooms import CallableRoom

sys.modules[__name__].__class__ = CallableRoom
