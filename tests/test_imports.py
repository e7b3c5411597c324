"""Imports point down only, as docs/architecture.md draws it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stepwell"

# Rooms of one level don't import each other.
LEVELS = [
    ["types"],
    ["schema", "files"],
    ["sections"],
    ["config"],
    ["presets"],
    ["tokenizer", "metrics", "hardware", "launch"],
    ["models", "data", "ranks"],
    ["parallel", "generate"],
    ["train"],
    ["plan", "eval"],
    ["diagnose", "posttrain", "curate", "mix"],
    ["labs"],
    ["commands"],
    ["quickstart"],
    ["cli"],
    ["__main__"],
]
LEVEL = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
WITHOUT_TORCH = [
    "types",
    "schema",
    "files",
    "config",
    "presets",
    "cli",
    "commands.plan",
    "commands.training",
    "launch.environ",
    "launch.local",
    "launch.peers",
    "launch.slurm",
    "plan.memory.ledger",
    "train.run_checkpoints",
    "plan.explain.page",
    "hardware",
    "metrics",
]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.Module) -> set[tuple[str, int]]:
    """(room, line) of every import of our own, also within functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the full name"
            module = node.module or ""
            names = [module]
            if module == "stepwell":
                names = [f"stepwell.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "stepwell" and len(parts) > 1:
                found.add((parts[1], node.lineno))
    return found


def wrong_imports(path: Path, room: str, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{line}: {room} imports {other}"
        for other, line in sorted(imported_rooms(tree))
        if other in LEVEL and other != room and LEVEL[other] >= LEVEL[room]
    ]


def test_imports_point_down():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        room = room_of(path)
        if room in LEVEL:
            wrong += wrong_imports(path, room, ast.parse(path.read_text("utf-8")))
    assert wrong == []


def test_every_room_has_its_level():
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")}
    assert rooms - {"__init__", "recipes"} <= set(LEVEL)


@pytest.mark.parametrize(
    ("room", "code", "caught"),
    [
        ("config", "def f():\n    from stepwell.train.engine import Engine", True),
        ("models", "from stepwell.data import batch", True),
        ("data", "from stepwell import generate", True),
        ("train", "import stepwell.models.transformer", False),
        ("train", "from stepwell.train.losses import Loss", False),
    ],
)
def test_an_upward_import_is_caught(room, code, caught):
    assert bool(wrong_imports(Path("x.py"), room, ast.parse(code))) == caught


def test_packages_are_empty():
    inits = [p for p in SOURCE.rglob("__init__.py") if p.parent != SOURCE]
    assert [str(p) for p in inits if p.read_text()] == []


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_a_room_without_torch(room):
    code = f"import sys, stepwell.{room}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"stepwell.{room} imports torch"
