"""The pages say what the code does: keys, types, defaults, commands and options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.cli import COMMANDS
from stepwell.commands.run_arguments import default_text, shipped_recipes, type_text
from stepwell.config import Run
from stepwell.schema import dotted_keys
from stepwell.sections.methods import (
    DPO,
    GRPO,
    PPO,
    SFT,
    OnlineDPO,
    Pretrain,
    RewardModel,
    SampledMethod,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Commands whose help is one for each of these.
ACTIONS = {
    "tokenizer": ("train", "encode"),
    "mix": ("sweep", "fit", "propose", "doremi", "validate"),
}
KEY_ROW = re.compile(r"^\| `([\w.]+)` \| (.*?) \| (?:`(.*?)`)? \| (\S.*) \|$", re.MULTILINE)


def rows_of_config_page() -> list[tuple[str, str, str]]:
    text = (DOCS / "config.md").read_text("utf-8")
    return [(key, kind.replace(r" \| ", "|"), default) for key, kind, default, _ in
            KEY_ROW.findall(text)]  # fmt: skip


def rows_of_code() -> list[tuple[str, str, str]]:
    keys = [(k, f) for k, f in dotted_keys(Run) if not k.startswith("method.")]
    for method in (Pretrain, SFT, DPO, RewardModel):
        keys += list(dotted_keys(method, "method."))
    shared = list(dotted_keys(SampledMethod, "method."))
    keys += shared
    for method in (GRPO, PPO, OnlineDPO):  # what they do not have in common
        known = [(key, str(f.annotation), f.default) for key, f in shared]
        own = dotted_keys(method, "method.")
        keys += [(k, f) for k, f in own if (k, str(f.annotation), f.default) not in known]
    return [(key, type_text(f.annotation), default_text(f.default)) for key, f in keys]


def test_config_page_has_every_key_with_its_type_and_default():
    assert rows_of_config_page() == rows_of_code()


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_a_page(name):
    page = (DOCS / "commands" / f"{name}.md").read_text("utf-8")
    assert page.startswith(f"# stepwell {name}\n")
    assert f"commands/{name}.md" in (DOCS / "index.md").read_text("utf-8")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_options_of_a_page_exist(name):
    """Every `--option` that a page names is in the command's help."""
    text = (DOCS / "commands" / f"{name}.md").read_text("utf-8")
    others = re.compile(rf"(torchrun|stepwell (?!{name}\b)).*")
    page = "\n".join(line for line in text.splitlines() if not others.match(line))
    actions = ACTIONS.get(name, (None,))
    shown = ""
    for action in actions:
        words = [name, *([action] if action else []), "--help"]
        command = [sys.executable, "-m", "stepwell.cli", *words]
        shown += subprocess.run(command, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*[a-z]", page)) - {"--help"}
    known = set(re.findall(r"--[a-z][\w.-]*[a-z]", shown))
    assert named <= known


def test_readme_names_commands_and_targets_that_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| `stepwell ([\w-]+)`", text, re.MULTILINE)) == set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets


@pytest.mark.parametrize("page", sorted(p.relative_to(ROOT) for p in ROOT.glob("docs/**/*.md")))
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text("utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), f"{page} links to {link}"


def test_recipes_are_listed():
    text = (DOCS / "index.md").read_text("utf-8")
    for path in shipped_recipes():
        assert f"`{path.stem}`" in text
