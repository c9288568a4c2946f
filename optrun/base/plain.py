"""Names of the dictionaries that JSON and YAML hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PlainDict = dict[str, Any]
"""An object of JSON, or a mapping of YAML: plain values by name."""

PlainMapping = Mapping[str, Any]
"""The same, only read."""
