"""`stepwell lab [NAME]`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from stepwell import labs
from stepwell.commands.inputs import Place, parse_options
from stepwell.data.files import clean_disk_errors
from stepwell.types import ConfigError, StepwellError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "CLAIM"


@dataclass
class Lab:
    """Measures what a technique claims on this machine, and says whether the claim holds. Without a
    name: the labs and their claims.

    Writes numbers.json, plot.svg and, where there is more to read, page.html. The exit code is 1
    when the claim does not hold."""

    name: Positional[str | None] = None
    """Which lab."""
    small: bool = False
    """Seconds instead of minutes, with fewer points."""
    out: Place = None
    """Where to write; without it, runs/labs/NAME."""
    json: bool = False
    """Print the claim, the verdict and the numbers as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("lab", Lab, argv)
    known = claims()
    if options.name is None:
        print(json.dumps(known) if options.json else listing(known))
        return 0
    if options.name not in known:
        raise ConfigError(
            f"unknown lab {options.name!r}{nearest(options.name, known)}; `stepwell lab` lists them"
        )
    lab = importlib.import_module(f"stepwell.labs.{options.name}")
    out = Path(options.out or f"runs/labs/{options.name}")
    with clean_disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    text = as_json(lab.measure(options.small), options.name)
    # What is written is what is judged.
    wrong = lab.check(json.loads(text))
    page = lab.page(json.loads(text)) if hasattr(lab, "page") else None
    written = write(out, text, lab.plot(json.loads(text)), page)
    if options.json:
        verdict = {"lab": options.name, "claim": lab.CLAIM, "holds": not wrong}
        more = {"contradictions": wrong, "out": str(out), "numbers": json.loads(text)}
        print(json.dumps(verdict | more))
    else:
        print("\n".join([lab.CLAIM, *verdict_lines(wrong), ", ".join(map(str, written))]))
    return 1 if wrong else 0


def claims() -> dict[str, str]:
    """Name of each lab and what it claims. Modules are read, not imported (they import torch)."""
    found = {}
    for module in sorted(pkgutil.iter_modules(labs.__path__), key=lambda m: m.name):
        file = importlib.util.find_spec(f"{labs.__name__}.{module.name}")
        assert file is not None
        assert file.origin is not None
        claim = claim_of(ast.parse(Path(file.origin).read_text("utf-8")))
        if claim is not None:
            found[module.name] = claim
    return found


def claim_of(module: ast.Module) -> str | None:
    """The literal that a module assigns to CLAIM at its top level."""
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        named = any(isinstance(target, ast.Name) and target.id == CLAIM for target in targets)
        if named and statement.value is not None:
            return str(ast.literal_eval(statement.value))
    return None


def listing(known: dict[str, str]) -> str:
    lines = [f"  {name:<12}{claim}" for name, claim in known.items()]
    return "\n".join([*lines, "", "stepwell lab NAME measures one; --small takes seconds."])


def verdict_lines(wrong: Sequence[str]) -> list[str]:
    return ["does not hold:", *(f"  {line}" for line in wrong)] if wrong else ["holds"]


def as_json(numbers: dict[str, Any], name: str) -> str:
    """Raises StepwellError for what JSON cannot hold (also NaN and infinity)."""
    try:
        return json.dumps(numbers, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise StepwellError(f"lab {name}: its numbers are no JSON: {error}") from error


def write(folder: Path, numbers: str, plot: Figure, page: str | None) -> list[Path]:
    """numbers.json, plot.svg and page.html, each whole or untouched; the same numbers give the same
    bytes."""
    import matplotlib

    with clean_disk_errors(folder):
        temporary, written = folder / f".plot.svg.{os.getpid()}", []
        try:
            with matplotlib.rc_context({"svg.hashsalt": "stepwell"}):
                plot.savefig(temporary, format="svg", metadata={"Date": None})
            os.replace(temporary, folder / "plot.svg")
            for name, text in (("page.html", page), ("numbers.json", numbers)):
                if text is not None:
                    temporary.write_text(text, "utf-8")
                    os.replace(temporary, folder / name)
                    written.insert(0, folder / name)
        finally:
            temporary.unlink(missing_ok=True)
    return [written[0], folder / "plot.svg", *written[1:]]
