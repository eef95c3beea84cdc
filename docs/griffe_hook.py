"""Docstrings as the site shows them: `<w, f>` is an inner product and no element of HTML, and examples are code."""

import re
from typing import Any

import griffe

SHARED = re.compile(r"^    (\w+(?:, \w+)+): ((?:.*)(?:\n {5,}.*)*)", re.MULTILINE)  # several parameters in one entry
PRODUCT = re.compile(r"<([^<>\n]+,[^<>\n]+)>")


class Docstrings(griffe.Extension):
    """Rewrite what Markdown and the parser of docstrings would misread."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object when it has been read."""
        if obj.docstring is not None:
            text = PRODUCT.sub("⟨\\1⟩", obj.docstring.value)
            text = SHARED.sub(lambda entry: _apart(entry[1], entry[2]), text)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def _apart(names: str, words: str) -> str:
    return "\n".join(f"    {name}: {words}" for name in names.split(", "))
