"""How words and numbers are written on a page."""

import html
import re


def escape(text: str) -> str:
    """Text for HTML and XML: markup escaped, what neither can hold replaced."""
    text = re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
    return html.escape(text)


def number(value: float, digits: int = 6) -> str:
    """A number as people write it, with a true minus sign: 0.25, 1200, 2e30."""
    text = f"{value + 0.0:.{digits}g}" if abs(value) < 1e7 else f"{value:.{digits - 1}e}"
    mantissa, _, exponent = text.partition("e")
    if exponent:
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        mantissa += f"e{int(exponent)}"
    return mantissa.replace("-", "\N{MINUS SIGN}")
