"""`stepwell mix sweep | fit | propose | doremi | validate`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from stepwell.commands.inputs import Place, parse_options
from stepwell.types import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from stepwell.mix.sweep import Sweep

HELP = """usage: stepwell mix {sweep,fit,propose,doremi,validate} ...

  sweep RECIPE --out DIR    proxy runs on a design of mixtures, each scored on held-out stores
  fit DIR                   a law of the losses, and how well it ranks runs it has not seen
  propose DIR --tokens N    the mixture with the lowest target under caps on repetition: how sure
  doremi RECIPE --out DIR   weights from a proxy that is trained by group DRO, instead of a sweep
  validate DIR --checkpoint RUN   candidate mixtures as anneals of a half-trained model

stepwell mix sweep --help describes its options."""
PROPOSAL, RECIPE = "proposal.json", "proposal.toml"
NATURAL, PROPOSED = "natural", "proposed"


@dataclass
class SweepOptions:
    """Trains proxies on a design of mixtures. The recipe is one of `stepwell pretrain`: its
    data.sources are the domains, its data.heldout the targets. Finished runs are kept."""

    recipe: Positional[str]
    """A TOML file, or the name of a recipe that ships."""
    out: str
    """The sweep's folder."""
    runs: int = 32
    """How many proxies in all; may be raised later."""
    design: Literal["auto", "dirichlet", "maximin"] = "auto"
    """dirichlet: around the sizes (RegMix); maximin: spread over all mixtures; auto: maximin for up
    to 4 domains, dirichlet for more."""
    power: float = 0.5
    """The design's centre is size to this power: 1 natural, 0 uniform."""
    natural: int = 2
    """How many of the runs are the natural mixture, with seeds of their own."""
    seed: int = 0
    """Of the design."""
    procs: int = 1
    """How many proxies to train at once."""
    json: bool = False
    """Print the result as JSON."""


@dataclass
class FitOptions:
    """Fits a law to a sweep and says how well it predicts runs that were left out."""

    folder: Positional[str]
    """A sweep's folder."""
    law: Literal["log-linear", "trees"] = "log-linear"
    """log-linear: c + k exp(t.r); trees: gradient-boosted, for many runs (needs lightgbm)."""
    json: bool = False
    """Print the result as JSON."""


@dataclass
class ProposeOptions:
    """The mixture with the lowest predicted target, or the natural one where the gain is inside
    the noise. Writes proposal.json and proposal.toml into the sweep's folder."""

    folder: Positional[str]
    """A sweep's folder."""
    tokens: float
    """How many tokens the run will read, e.g. 5e9."""
    max_epochs: float = 4.0
    """How often a domain may be read, where the recipe doesn't say (2305.16264)."""
    target: tuple[str, ...] = ()
    """NAME=WEIGHT of held-out stores, instead of the recipe's."""
    law: Literal["log-linear", "trees"] = "log-linear"
    """As in fit."""
    draws: int = 200
    """Of the bootstrap."""
    seed: int = 0
    """Of the bootstrap."""
    json: bool = False
    """Print the result as JSON."""


@dataclass
class DoremiOptions:
    """DoReMi (2305.10429): a reference run on the recipe's weights, then a proxy whose domain
    weights follow where it is behind the reference. Goes on where it was stopped."""

    recipe: Positional[str]
    """A TOML file, or the name of a recipe that ships."""
    out: str
    """The folder for the reference, the proxy and doremi.json."""
    reference: Place = None
    """A run or checkpoint that is the reference already."""
    step_size: float = 1.0
    """eta of the paper."""
    smoothing: float = 1e-3
    """Share of the uniform mixture in every step's weights."""
    json: bool = False
    """Print the result as JSON."""


@dataclass
class ValidateOptions:
    """Branches a half-trained model: on each mixture the learning rate decays to 0, and the
    held-out losses are compared. Without --mix: the sweep's natural and proposed mixtures."""

    folder: Positional[str]
    """A sweep's folder."""
    checkpoint: str
    """A run's folder, or a checkpoint in it."""
    steps: int
    """How long each anneal is."""
    seeds: int = 3
    """How many times each mixture is annealed."""
    mix: tuple[str, ...] = ()
    """NAME:DOMAIN=WEIGHT,DOMAIN=WEIGHT; the first is what the others are compared with."""
    lr: float | None = None
    """The rate that the anneals begin with; without it, the checkpoint's."""
    out: Place = None
    """Where to write; without it, DIR/validate."""
    procs: int = 1
    """How many anneals at once."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    actions = {
        "sweep": sweep,
        "fit": fit,
        "propose": propose,
        "doremi": doremi,
        "validate": validate,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] not in actions:
        raise ConfigError(
            f"mix has no {argv[0]!r}{nearest(argv[0], actions)}; it has {', '.join(actions)}"
        )
    return actions[argv[0]](argv[1:])


def sweep(argv: Sequence[str]) -> int:
    options = parse_options("mix sweep", SweepOptions, argv)
    from stepwell.mix import sweep as mix

    _number("--power", options.power, None)
    _count("--natural", options.natural)
    _count("--procs", options.procs)
    _count("--seed", options.seed, 0)
    _count("--runs", options.runs, options.natural + 1)
    recipe = _recipe(options.recipe)
    plan = (options.runs, options.design, options.power, options.natural, options.seed)
    mix.check_design(recipe, *plan)
    found = mix.sweep(
        recipe,
        options.out,
        *plan,
        options.procs,
        say=_say,
    )
    if options.json:
        print(json.dumps({"folder": options.out, "runs": len(found.runs)}))
    else:
        print(f"{len(found.runs)} runs: {options.out}/{mix.TABLE}")
        print(f"next: stepwell mix propose {options.out} --tokens N")
    return 0


def fit(argv: Sequence[str]) -> int:
    options = parse_options("mix fit", FitOptions, argv)
    from stepwell.mix import fit as laws
    from stepwell.mix.sweep import load_sweep

    found = load_sweep(options.folder)
    law = laws.fit(options.law, found.mixtures, found.losses)
    quality = laws.cross_validate(options.law, found.mixtures, found.losses)
    outcomes: dict[str, Any] = {}
    for o, target in enumerate(found.targets):
        outcomes[target.name] = {
            "spearman": float(quality.spearman_O[o]),
            "rmse": float(quality.rmse_O[o]),
        }
        if isinstance(law, laws.LogLinear):
            slopes = zip(found.domains, law.slopes_OD[o].tolist(), strict=True)
            outcomes[target.name] |= {
                "floor": float(law.floors_O[o]),
                "slopes": {domain.name: slope for domain, slope in slopes},
            }
    result = {"law": options.law, "runs": len(found.runs), "outcomes": outcomes}
    text = json.dumps(result, indent=1)
    _write(Path(options.folder) / "fit.json", text)
    print(text if options.json else _fit_text(result))
    return 0


def _fit_text(result: dict[str, Any]) -> str:
    outcomes = result["outcomes"]
    width = max(8, *(len(name) for name in outcomes)) + 2
    lines = [
        f"{result['law']} law of {result['runs']} runs; of runs left out of the fit:",
        f"{'':<{width}}{'rank correlation':>18}{'error (nats)':>14}",
    ]
    lines += [
        f"{name:<{width}}{row['spearman']:>18.3f}{row['rmse']:>14.4f}"
        for name, row in outcomes.items()
    ]
    return "\n".join(lines)


def propose(argv: Sequence[str]) -> int:
    options = parse_options("mix propose", ProposeOptions, argv)
    from stepwell.mix import table
    from stepwell.mix.propose import LEAST_DRAWS
    from stepwell.mix.propose import propose as find

    _number("--max-epochs", options.max_epochs)
    _count("--draws", options.draws, LEAST_DRAWS)
    _count("--seed", options.seed, 0)
    tokens = _whole("--tokens", options.tokens)
    found = _sweep(options.folder)
    epochs = {d.name: d.max_epochs or options.max_epochs for d in found.domains}
    proposal = find(
        [domain.name for domain in found.domains],
        [domain.tokens for domain in found.domains],
        found.mixtures,
        found.losses,
        targets_of(found, options.target),
        tokens,
        [domain.max_epochs for domain in found.domains],
        options.law,
        options.draws,
        options.seed,
        options.max_epochs,
    )
    folder = Path(options.folder)
    text = json.dumps(table.as_json(proposal), indent=1)
    _write(folder / PROPOSAL, text)
    paths = {domain.name: domain.path for domain in found.domains}
    _write(folder / RECIPE, table.as_recipe(proposal, paths, epochs))
    if options.json:
        print(text)
    else:
        print(f"{table.as_text(proposal)}\n{folder / PROPOSAL}, {folder / RECIPE}")
    return 0


def targets_of(found: Sweep, words: Sequence[str]) -> dict[str, float]:
    """Weight of every target: those of `words` (NAME=WEIGHT; others 0), or the recipe's."""
    if not words:
        return {target.name: target.weight for target in found.targets}
    given = _weights(words, "--target")
    names = [target.name for target in found.targets]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"--target {name!r} is no held-out store of the sweep{nearest(name, names)}; it "
                f"has {', '.join(names)}"
            )
    return {name: given.get(name, 0.0) for name in names}


def doremi(argv: Sequence[str]) -> int:
    options = parse_options("mix doremi", DoremiOptions, argv)
    from stepwell.mix.doremi import check_settings
    from stepwell.mix.doremi import doremi as find
    from stepwell.mix.files import check_plan
    from stepwell.mix.sweep import domains_of
    from stepwell.train.lock import folder_lock
    from stepwell.train.pretrain import pretrain

    check_settings(options.step_size, options.smoothing)
    recipe, out = _recipe(options.recipe), Path(options.out)
    domains, _ = domains_of(recipe)
    reference = options.reference
    plan = {
        "recipe": recipe.model_dump(mode="json", exclude_none=True, exclude={"dir", "name"}),
        "reference": None if reference is None else str(Path(reference).absolute()),
        "step_size": options.step_size,
        "smoothing": options.smoothing,
    }
    with folder_lock(out):
        check_plan(out / "plan.json", plan, f"doremi in {out}")
    if reference is None:
        run = _named(recipe, out / "reference", "reference")
        pretrain(run)
        reference = run.dir
    weights = find(
        _named(recipe, out / "proxy", "proxy"), reference, options.step_size, options.smoothing
    )
    average = dict(zip([d.name for d in domains], weights.average.tolist(), strict=True))
    last = dict(zip(average, weights.now_D.tolist(), strict=True))
    result = {"weights": average, "last_step": last, "steps": weights.num_steps}
    _write(out / "doremi.json", json.dumps(result, indent=1))
    if options.json:
        print(json.dumps(result))
    else:
        print(f"weights, averaged over {weights.num_steps} steps (at the last step):")
        print("\n".join(f"  {n:<14}{w:.3f} ({last[n]:.3f})" for n, w in average.items()))
    return 0


def validate(argv: Sequence[str]) -> int:
    options = parse_options("mix validate", ValidateOptions, argv)
    from dataclasses import asdict

    from stepwell.mix import validate as mix

    _count("--procs", options.procs)
    if options.lr is not None:
        _number("--lr", options.lr)
    found = _sweep(options.folder)
    mixes = _mixes(options.mix) or _proposed(Path(options.folder))
    verdicts = mix.validate(
        options.checkpoint,
        mixes,
        found.domains,
        found.targets,
        options.out or Path(options.folder) / "validate",
        _count("--steps", options.steps),
        range(_count("--seeds", options.seeds)),
        options.procs,
        options.lr,
        say=_say,
    )
    if options.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts]))
    else:
        print(mix.as_text(verdicts))
    return 0


def _proposed(folder: Path) -> dict[str, dict[str, float]]:
    """The mixtures of the last `propose`."""
    path = folder / PROPOSAL
    if not path.is_file():
        raise DataError(f"{folder} holds no proposal; `stepwell mix propose` first, or give --mix")
    from stepwell.mix.files import read_json

    try:
        domains = read_json(path)["domains"]
        return {kind: {d["name"]: d[kind] for d in domains} for kind in (NATURAL, PROPOSED)}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is no proposal: {error}; `stepwell mix propose` again") from error


def _mixes(words: Sequence[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for word in words:
        name, weights = _mix(word)
        if name in found:
            raise ConfigError(f"--mix names {name!r} twice; give each mixture a name of its own")
        found[name] = weights
    return found


def _mix(word: str) -> tuple[str, dict[str, float]]:
    name, colon, weights = word.partition(":")
    if not (name and colon) or "/" in name:
        raise ConfigError(
            f"--mix {word!r} is not NAME:DOMAIN=WEIGHT,..., e.g. web:web=0.8,code=0.2"
        )
    return name, _weights(weights.split(","), "--mix")


def _weights(words: Sequence[str], option: str) -> dict[str, float]:
    found = {}
    for word in words:
        name, equals, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            equals, weight = "", 0.0
        if equals and not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{option} {word!r}: a weight is a number of 0 or more")
        if equals and name in found:
            raise ConfigError(f"{option} names {name!r} twice; give it once")
        found[name] = weight
        if not equals:
            raise ConfigError(f"{option} {word!r} is not NAME=NUMBER, e.g. web=0.5")
    return found


def _whole(option: str, number: float) -> int:
    if not 1 <= number < 1e18:
        raise ConfigError(f"{option} {number:g} must be 1 or more, e.g. 5e9")
    return int(number)


def _count(option: str, number: int, least: int = 1) -> int:
    if number < least:
        raise ConfigError(f"{option} {number} must be at least {least}, the nearest legal value")
    return number


def _number(option: str, number: float, above: float | None = 0.0) -> float:
    if not math.isfinite(number) or (above is not None and number <= above):
        kind = "a finite number" if above is None else f"a finite number above {above:g}"
        raise ConfigError(f"{option} {number:g} must be {kind}")
    return number


def _recipe(name: str):
    from stepwell.commands.run_arguments import find_recipe
    from stepwell.config import Run

    return Run.load(find_recipe(name))


def _named(recipe: Any, folder: Path, name: str):
    from stepwell.config import Run

    values = recipe.model_dump(mode="json", exclude_none=True)
    return Run.parse(values, {"dir": str(folder), "name": name}, where=f"the {name} run")


def _sweep(folder: str) -> Sweep:
    from stepwell.mix.sweep import load_sweep

    return load_sweep(folder)


def _write(path: Path, text: str) -> None:
    from stepwell.files import write_text

    write_text(path, text.rstrip("\n") + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
