"""Shared by the scripts that generate a page of docs/: write it, or check that it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(page: Path, text: str) -> int:
    """Write the page, or with --check compare it with the text; returns the exit code."""
    if "--check" in sys.argv[1:]:
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            print(f"{page} is out of date: run `make docs`", file=sys.stderr)
            return 1
        return 0
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}", file=sys.stderr)
    return 0
