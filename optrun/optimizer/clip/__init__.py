"""How large a gradient may be."""

from optrun.optimizer.clip.build import build_clip
from optrun.optimizer.clip.clips import Clip

__all__ = ["Clip", "build_clip"]
