"""The command line: finds the command and runs it. Nothing heavy is imported before that."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from stepwell import __version__
from stepwell.types import StepwellError, nearest


class Command(NamedTuple):
    """target: `module:function`; it takes the arguments after the name and returns an exit code
    (None for 0)."""

    name: str
    summary: str
    target: str


GROUPS: dict[str, tuple[Command, ...]] = {
    "Start here": (
        Command(
            "quickstart",
            "a small model's whole life, from raw text to a report",
            "stepwell.quickstart.main:main",
        ),
    ),
    "Data": (
        Command(
            "corpus",
            "fetch real text out of packages, to try a curation on",
            "stepwell.commands.corpus:main",
        ),
        Command(
            "curate",
            "raw documents to token stores with a datasheet, every drop with its reason",
            "stepwell.commands.curate:main",
        ),
        Command(
            "dedup",
            "remove exact, near and partial duplicates, each with its witness",
            "stepwell.commands.verbs:dedup",
        ),
        Command(
            "langid",
            "label documents with their language, and keep some",
            "stepwell.commands.verbs:langid",
        ),
        Command(
            "quality",
            "drop what published rules take for noise",
            "stepwell.commands.verbs:quality",
        ),
        Command(
            "quality-filter",
            "score documents with a classifier and keep the best",
            "stepwell.commands.verbs:quality_filter",
        ),
        Command(
            "problems",
            "problems with known answers, to train, to sample and to measure on",
            "stepwell.commands.problems:main",
        ),
        Command(
            "pairs",
            "preference pairs or right answers, out of a model's own scored samples",
            "stepwell.commands.pairs:main",
        ),
        Command(
            "train-quality-classifier",
            "a classifier that tells good texts from bad ones, measured on held-out texts",
            "stepwell.commands.quality_classifier:main",
        ),
        Command(
            "pii",
            "redact personal information",
            "stepwell.commands.verbs:pii",
        ),
        Command(
            "decontam",
            "remove documents that hold a benchmark's items",
            "stepwell.commands.verbs:decontam",
        ),
        Command(
            "decontam-index",
            "index benchmarks, so that decontam finds their items",
            "stepwell.commands.decontam:make_index",
        ),
        Command(
            "tokenizer",
            "train a byte-level BPE, and turn documents into a token store",
            "stepwell.commands.tokenizer:main",
        ),
        Command(
            "mix",
            "domain weights by evidence: proxy runs, a law, a proposal, a check",
            "stepwell.commands.mix:main",
        ),
    ),
    "Training": (
        Command(
            "pretrain",
            "next-token training on token stores, from scratch or continued",
            "stepwell.commands.training:pretrain",
        ),
        Command("sft", "fine-tuning on conversations", "stepwell.commands.training:sft"),
        Command(
            "dpo",
            "learning from pairs of answers: DPO, IPO, KTO, SimPO and their relatives",
            "stepwell.commands.training:dpo",
        ),
        Command(
            "online-dpo",
            "learning from pairs of the model's own answers, sampled and scored as it trains",
            "stepwell.commands.training:online_dpo",
        ),
        Command(
            "reward",
            "a model that scores answers, or their steps",
            "stepwell.commands.training:reward",
        ),
        Command(
            "ppo",
            "reinforcement learning with a critic",
            "stepwell.commands.training:ppo",
        ),
        Command(
            "grpo",
            "reinforcement learning with verifiable rewards",
            "stepwell.commands.training:grpo",
        ),
    ),
    "Before a run": (
        Command(
            "plan",
            "memory, traffic, step time and layout of a run before it starts, and why",
            "stepwell.commands.plan:main",
        ),
    ),
    "Clusters": (
        Command(
            "launch",
            "write a Slurm script that runs a recipe, and goes on when it is stopped",
            "stepwell.commands.launch:main",
        ),
    ),
    "Using a model": (
        Command(
            "eval",
            "bits per byte, multiple choice and exact answers, with intervals",
            "stepwell.commands.evaluate:main",
        ),
        Command("generate", "sample from a model", "stepwell.commands.generate:main"),
        Command(
            "score",
            "what reward models say of answers, pairs, or steps",
            "stepwell.commands.score:main",
        ),
        Command(
            "reward-test",
            "try a reward on rows and on junk, before a policy does",
            "stepwell.commands.reward_test:main",
        ),
        Command(
            "export",
            "write a checkpoint as a Hugging Face folder",
            "stepwell.commands.export:main",
        ),
        Command(
            "average",
            "the mean of a run's last checkpoints, instead of a decay",
            "stepwell.commands.average:main",
        ),
        Command("report", "a run's folder as one HTML page", "stepwell.commands.report:main"),
        Command(
            "replay",
            "a step of a run once more, with what passes through its layers",
            "stepwell.commands.replay:main",
        ),
    ),
    "Learning": (
        Command(
            "lab",
            "measure what a technique claims: numbers, a plot, a verdict",
            "stepwell.commands.lab:main",
        ),
    ),
}
FULL = {errno.ENOSPC, errno.EDQUOT}
# What a system says about a path that somebody named, and never because code of ours is wrong.
REFUSALS = FULL | {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG,
    errno.EEXIST, errno.ELOOP, errno.EFBIG, errno.EIO,
}  # fmt: skip
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. Without argv this is the whole process: after a
    Ctrl-C that has been answered, another one of the same request cannot change how it ends.

    A StepwellError becomes its message and its exit code, and so does a path that the system
    refuses; any other exception is a fault of ours and keeps its traceback.
    """
    code = _run(list(sys.argv[1:] if argv is None else argv))
    if argv is None and code == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _run(arguments: list[str]) -> int:
    # OpenMP threads wait for each other by spinning for milliseconds; beside any other load that
    # costs several times the work itself. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except StepwellError as error:
        print(f"stepwell: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stepwell: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        where = _refused_path(error, arguments)
        if where is None:
            raise
        advice = "; free some space" if error.errno in FULL else ""
        print(f"stepwell: {where}: {error.strerror}{advice}", file=sys.stderr)
        return 1


def _refused_path(error: OSError, arguments: Sequence[str]) -> str | None:
    """What the system refused. A full disk is met in a write, which knows no name: then it is
    standard output, or what the command was told to write."""
    named = error.filename2 or error.filename
    if isinstance(named, str | bytes):
        return os.fsdecode(named)
    if error.errno not in FULL:
        return None
    if _output_is_full():
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "standard output"
    words = [part for word in arguments for part in word.split("=", 1)]
    targets = [v for key, v in itertools.pairwise(words) if key in ("--out", "--dir")]
    return targets[0] if targets else f"the disk of {os.getcwd()}"


def _output_is_full() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error.errno in FULL
    return False


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"stepwell {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        close = nearest(arguments[0], COMMANDS)
        print(
            f"stepwell: unknown command {arguments[0]!r}{close}; stepwell --help lists them",
            file=sys.stderr,
        )
        return 2
    if "STEPWELL_LAUNCHER_PID" in os.environ:
        importlib.import_module("stepwell.launch.local").end_with_launcher(os.environ)
    module, _, function = command.target.partition(":")
    return getattr(importlib.import_module(module), function)(arguments[1:]) or 0


def help_text() -> str:
    lines = [
        f"stepwell {__version__}: trains language models through their whole life",
        "",
        "usage: stepwell COMMAND [recipe.toml] [--dotted.key value ...]",
    ]
    width = max(map(len, COMMANDS)) + 2
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {command.name:<{width}}{command.summary}" for command in commands]
    lines += [
        "",
        "stepwell COMMAND --help describes a command and its options.",
        "Ctrl-C saves and says how to go on; the same command goes on from there.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
