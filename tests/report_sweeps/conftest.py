"""What makes the stored sweeps is no test: the plugin would register its optimizer here."""

from __future__ import annotations

collect_ignore = ["make.py", "unsteady.py"]
