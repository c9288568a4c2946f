"""How large a gradient may be."""

from optrun.clip.build import build_clip
from optrun.clip.clips import Clip

__all__ = ["Clip", "build_clip"]
