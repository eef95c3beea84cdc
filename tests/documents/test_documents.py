"""What the documents say is so: programs run and print it, commands and their options exist, links lead somewhere."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kernelhead.cli import app
from kernelhead_lab.cli import app as lab_app

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted(
    [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab/docs").glob("*.md")]
)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "--- the next program of the page ---"
# What stands for more than one machine or for another's account: replaced by less of the same.
SMALLER = {
    "scale.md": {
        '"nccl")  # under torchrun': '"gloo", store=distributed.HashStore(), rank=0, world_size=1)',
        "10_000_000": "1000",
        ', device="cuda"': "",
    },
    "saving.md": {
        'kernelhead.push_to_hub(model, "somebody/pets", private=True, data="Oxford-IIIT Pet")': "",
        'kernelhead.load("somebody/pets", revision="main")': 'kernelhead.load("pets")',
    },
}
# What a page takes for granted, in front of its programs.
GIVEN = {
    "scale.md": """
import torch
device, backbone = torch.device("cpu"), torch.nn.Linear(8, 512)
model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
images, target = torch.randn(4, 8), torch.randint(1000, (4,))
""",
    "loss.md": """
import torch
from kernelhead import KernelHead, kernel_cross_entropy
head, features, target = KernelHead(64, 10), torch.randn(8, 64), torch.randint(10, (8,))
""",
    "beyond.md": """
import torch, torchvision
from torch.nn import functional as F
model, images, labels = torchvision.models.resnet18(), torch.randn(4, 3, 32, 32), torch.randint(100, (4,))
""",
}
NEEDS = {"lightning.md": "lightning", "ray.md": "ray", "accelerate.md": "accelerate"}


def blocks(path, *languages):
    """The blocks of code of a document in these languages, in order."""
    return [(kind, code) for kind, code in FENCE.findall(path.read_text()) if kind in languages]


def name_of(path):
    return str(path.relative_to(ROOT))


def run(path, folder):
    """Run the Python of a document as one program; return what each block is said to print and what it prints."""
    found = blocks(path, "python", "text")
    programs = [code for kind, code in found if kind == "python"]
    given, smaller = GIVEN.get(path.name, ""), SMALLER.get(path.name, {})
    for old, new in smaller.items():
        assert any(old in code for code in programs), f"{old} is no longer in {path}"
        programs = [code.replace(old, new) for code in programs]
    program = given + f"\nprint({MARK!r}, flush=True)\n".join(programs)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    (folder / "page.py").write_text(program)
    done = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, f"{path}:\n{done.stderr[-3000:]}"
    printed = iter(done.stdout.split(MARK + "\n"))
    pairs, last = [], ""
    for kind, code in found:
        last = next(printed) if kind == "python" else last
        pairs += [(code, last)] if kind == "text" else []
    return pairs


WITH_PYTHON = [path for path in DOCUMENTS if blocks(path, "python")]


@pytest.mark.parametrize(
    "path", [pytest.param(each, marks=[] if each == README else pytest.mark.slow) for each in WITH_PYTHON], ids=name_of
)
def test_programs_run_and_print_what_is_said(path, tmp_path):
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name])
    for said, printed in run(path, tmp_path):
        assert printed.strip() == said.strip()


def test_many_documents_have_programs():
    assert len(WITH_PYTHON) > 20


# --- commands ---------------------------------------------------------------------------------------------------------


def commands():
    """Every line of a shell in the documents, without comments; a backslash joins lines."""
    for path in DOCUMENTS:
        for _, code in blocks(path, "sh", ""):
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[-1] == "&":
                    words.pop()
                if words:
                    yield pytest.param(words, id=f"{name_of(path)}: {' '.join(words)}"[:100])


def check_options(command_line, words):
    """The verb has a help text, and every option of the line is one of its own."""
    group = typer.main.get_command(command_line)
    assert words, "a command needs a verb"
    verb = group.commands.get(words[0])
    assert verb is not None, f"there is no command {words[0]}"
    result = CliRunner().invoke(command_line, [words[0], "--help"])
    assert result.exit_code == 0, result.output
    known = {name for each in verb.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    used = {word.split("=")[0] for word in words[1:] if word.startswith("--")}
    assert used <= known, f"{words[0]} has no {', '.join(sorted(used - known))}"


@pytest.mark.parametrize("words", list(commands()))
def test_commands_exist(words):
    program, *rest = words
    if program == "torchrun":
        program, *rest = words[words.index("-m") + 1 :]
    if program in ("kernelhead", "kernelhead-lab"):
        check_options(app if program == "kernelhead" else lab_app, rest)
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {each for each in rest if "=" not in each} <= targets
    elif program == "python":
        assert (ROOT / rest[0]).is_file()
        assert rest[0].endswith(".py")
    elif program == "pip":
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        for listed in re.findall(r"\[(.*)\]", " ".join(rest)):
            assert set(listed.split(",")) <= extras
        assert rest[0] == "install"
    elif program == "ray":
        assert rest[0] in importlib.import_module("ray.scripts.scripts").cli.commands
    else:
        raise AssertionError(f"nothing checks {program!r}; say here how")


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(path):
    """The anchors of the headings of a document, as GitHub and the site make them."""
    text = FENCE.sub("", path.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(path):
    text = FENCE.sub("", path.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        assert not link.startswith(("http:", "https:")) or "://" in link
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = path.parent / place if place else path
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading {anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_images_have_words_for_those_who_do_not_see_them(path):
    for words in re.findall(r"!\[(.*?)\]\(", path.read_text()):
        assert len(words) > 20


def test_the_readme_stays_short():
    assert len(README.read_text().splitlines()) <= 105
