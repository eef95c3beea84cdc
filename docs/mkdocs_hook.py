"""A hook of MkDocs: documents from outside docs/, links between them, and the help texts of the commands."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
TAKEN_IN = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "lab/docs/": "laboratory/",
    "docs/": "",
}
LINK = re.compile(r"(\[[^\]]*\])\(([^)#\s]*)(#[^)\s]*)?\)")


def page_of(path: str) -> str | None:
    """Return where a file of the repository stands on the site; None for one that it has not."""
    for source, target in TAKEN_IN.items():
        if path == source or (source.endswith("/") and path.startswith(source)):
            return target + path.removeprefix(source) if source.endswith("/") else target
    return None


def on_files(files: Files, config: Any) -> Files:
    """Add README, changelog and the laboratory's documents and figures."""
    outside = [ROOT / name for name in TAKEN_IN if not name.endswith("/")]
    outside += sorted((ROOT / "lab/docs").rglob("*.*"))
    for path in outside:
        target = page_of(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, str(target), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages; of files without a page keep the words."""
    own = page.file.src_uri
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def turn(link: re.Match[str]) -> str:
        words, place, anchor = link[1], link[2], link[3] or ""
        if not place or "://" in place:
            return link[0]
        path = normpath(join(dirname(source), place))
        target = page_of(path)
        if target is None or not (ROOT / path).is_file():
            return words[1:-1]
        return f"{words}({relpath(target, dirname(own) or '.')}{anchor})"

    return LINK.sub(turn, markdown).replace("<!-- commands -->", _commands() if "<!-- commands -->" in markdown else "")


def _commands() -> str:
    """The help of every verb, each as a terminal shows it."""
    import typer
    from typer.testing import CliRunner

    from kernelhead.cli import app

    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = []
    for verb in verbs:
        options = {"prog_name": "kernelhead", "env": {"COLUMNS": "80", "TERM": "dumb"}}
        text = CliRunner().invoke(app, [verb, "--help"], **options).output
        parts.append(f"## kernelhead {verb}\n\n```text\n{_trimmed(text)}\n```\n")
    return "\n".join(parts)


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
