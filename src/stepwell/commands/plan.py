"""`stepwell plan`. No torch, but for --dry-run."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from stepwell.commands import plan_text
from stepwell.commands.plan_advice import fastest_of, gap_of, knobs_of
from stepwell.commands.plan_options import Asked, check_read, help_text, parse
from stepwell.commands.ranks import fewest_ranks
from stepwell.commands.run_arguments import find_recipe
from stepwell.commands.training import with_weights
from stepwell.config import Run
from stepwell.files import write_text
from stepwell.hardware import GIB
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import Cluster, cluster, read_cluster
from stepwell.plan.dims import Subject, find_model
from stepwell.plan.explain.answer import Review, Searched, as_json, review_json
from stepwell.plan.explain.reasons import explain
from stepwell.plan.job import how_to_start, job_of
from stepwell.plan.methods.recipes import workload_of
from stepwell.plan.methods.rollouts import Workload
from stepwell.plan.methods.text import packed_text
from stepwell.plan.search.candidates import Candidate, Ranking, nothing_fits, pareto
from stepwell.plan.search.checks import left_open, pins_text
from stepwell.plan.search.fewest import fewest_gpus
from stepwell.plan.search.prices import Prices, as_run
from stepwell.plan.search.runs import offloaded, run_of, short, values_of
from stepwell.plan.search.search import batches, search
from stepwell.plan.search.space import Task
from stepwell.plan.units import count_of
from stepwell.sections.methods import DPO, SampledMethod
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError, DataError, StepwellError

if TYPE_CHECKING:
    from stepwell.plan.methods.evaluated import Evaluated
    from stepwell.plan.methods.methods import MethodPlan

USUAL_GPU = "h100-sxm"
USUAL_SEQ_LEN = 8192
USUAL_BATCH_TOKENS = 4 << 20
# Options of --method, and the fields of `Workload` that they set.
WORKLOAD = {
    "prompts": "prompts",
    "group-size": "group_size",
    "prompt-tokens": "prompt_tokens",
    "answer-tokens": "answer_tokens",
    "seq-len": "seq_len",
}


def main(argv: Sequence[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(help_text())
        return 0
    asked = parse(argv)
    check_read(asked)
    for name in ("write", "html"):
        if name in asked.given:
            check_writable(f"--{name}", Path(asked.given[name]))
    if "validate" in asked.given:
        return _validate(asked)
    if asked.recipe is not None:
        return _recipe(asked)
    dimensions = any(key.startswith("model.") for key in asked.overrides)
    if not asked.get("model") and not dimensions:
        raise ConfigError(
            "nothing to plan: give --model, dimensions (--model.num_layers ...) or a recipe"
        )
    others = [key for key in asked.overrides if not key.startswith("model.")]
    if others:
        raise ConfigError(
            f"--{others[0]} belongs to a recipe; with --model only --model.* are read"
        )
    subject = find_model(asked.get("model"), asked.overrides)
    if subject.config is None and (asked.get("dry-run") or "write" in asked.given):
        option = "dry-run" if asked.get("dry-run") else "write"
        raise ConfigError(f"--{option}: the engine does not have {subject.missing} yet")
    if asked.get("zero-table"):
        return _zero_table(asked, subject)
    if asked.get("method", "pretrain") != "pretrain":
        return _method(asked, subject)
    return _model(asked, subject)


# --- a model: search -------------------------------------------------------------------------


def _model(asked: Asked, subject: Subject) -> int:
    machines, num_gpus = cluster_of(asked), gpus_of(asked)
    seq_len = asked.get("seq-len", USUAL_SEQ_LEN)
    tokens = asked.get("global-batch-tokens", max(USUAL_BATCH_TOKENS, seq_len))
    prices = Prices(subject.dims, machines, subject.config)
    ranking = search(
        subject.dims, machines, num_gpus, seq_len, tokens, asked.pins, subject.config, prices=prices
    )
    if not ranking.found:
        return _nothing_fits(asked, ranking, subject)
    measured = gap_of(asked, ranking.best.job, subject.config)
    if subject.missing:
        found = [replace(c, not_in_engine=subject.missing) for c in ranking.found]
        ranking = replace(ranking, found=tuple(found))
    deep, told = not asked.get("quick"), asked.given.keys() & {"measured", "json", "html"}
    known = (measured, prices, ranking.best, ranking.task)
    searched = Searched(
        ranking=ranking,
        explanation=explain(ranking, prices, deep),
        pareto=tuple(pareto(ranking.found)),
        batches=tuple(batches(ranking, prices)) if deep else (),
        knobs=knobs_of(*known) if told else (),
        training_tokens=asked.get("tokens"),
        assumed=_assumed_of_model(asked, subject, ranking),
        gap=measured,
        together=knobs_of(*known, in_turn=True) if measured else (),
        fastest=fastest_of(*known) if measured and deep else None,
    )
    if "write" in asked.given:
        write_recipe(Path(asked.given["write"]), subject, ranking.best)
    if "html" in asked.given:
        _page(asked, searched)
    best, dry = ranking.best, None
    if asked.get("dry-run"):
        assert subject.config is not None
        dry = run_of(subject.config, best.layout)
    if asked.get("json"):
        _print_json(as_json(searched, asked.get("top", 8)), dry, num_gpus, machines)
    else:
        plan_text.show(plan_text.searched(searched, asked.get("top", 8)))
        _show_dry_run(dry, num_gpus, machines)
    return 0


def _print_json(answer: dict[str, Any], dry: Run | None, world: int, machines: Cluster) -> None:
    """One object, with what a dry run of `dry` counts."""
    if dry is not None:
        program = _dry_program(dry)
        answer["dry_run"] = program.as_json(*program.count(dry, world, machines))
    print(json.dumps(answer))


def _show_dry_run(dry: Run | None, world: int, machines: Cluster) -> None:
    if dry is not None:
        program = _dry_program(dry)
        sys.stdout.flush()
        print("\n".join(program.lines(*program.count(dry, world, machines))))


def _dry_program(run: Run) -> Any:
    """Of a method with several models, all of them; imports torch."""
    from stepwell.commands import plan_dry_method, plan_dry_run

    several = run.method.kind in plan_dry_method.METHODS and run.layout.pp == 1
    return plan_dry_method if several else plan_dry_run


def _assumed_of_model(asked: Asked, subject: Subject, ranking: Ranking) -> tuple[str, ...]:
    found, task = [*subject.assumed], ranking.task
    choices = left_open(asked.pins, ranking.best.layout, task.dims)
    if "measured" in asked.given and choices:
        pins = pins_text(asked.pins) or "nothing"
        found.append(
            f"the layout that was measured is the fastest with what is held fixed ({pins}): "
            f"{short(ranking.best.layout)}; hold fixed what it has of {', '.join(choices)}, too"
        )
    if "gpu" not in asked.given and "cluster" not in asked.given:
        found.append(f"{USUAL_GPU} in its usual machines (--gpu, --cluster)")
    if "seq-len" not in asked.given:
        found.append(f"rows of {task.seq_len:,} tokens (--seq-len)")
    if longer := _longer(subject, task.seq_len):
        found.append(longer)
    tokens = asked.get("global-batch-tokens")
    if tokens is None:
        found.append(f"a batch of {task.tokens:,} tokens (--global-batch-tokens)")
    elif tokens != task.tokens:
        found.append(f"{tokens:,} tokens a step are rounded to whole rows")
    return (*found, *_assumed_of_machine(ranking.best))


def _assumed_of_machine(best: Candidate) -> list[str]:
    """Its memory, where the plan leans on it."""
    host = best.memory.host
    if host.known or not offloaded(best.layout):
        return []
    return [
        f"machines with {host.room / GIB:,.0f} GiB of their own, as is usual beside "
        f"{host.ranks_per_machine} x {best.job.cluster.accelerator.name}: offload needs "
        f"{host.total / GIB:,.0f} GiB of each (host_memory_gib of --cluster)"
    ]


def _longer(subject: Subject, seq_len: int) -> str:
    """What rows beyond the model's own context ask for; empty if they are within it."""
    if subject.config is None or seq_len <= subject.config.max_seq_len:
        return ""
    most = subject.config.max_seq_len
    if not subject.released:
        return f"positions up to {seq_len:,}, beyond the usual {most:,} (model.max_seq_len)"
    return (
        f"positions up to {seq_len:,}, though {subject.name} was made for {most:,} "
        "(model.max_seq_len): training from scratch learns them; weights that were trained before "
        "have seen none beyond, and nothing stretches them (model.rope_scaling is as it was)"
    )


def _nothing_fits(asked: Asked, ranking: Any, subject: Subject) -> int:
    more = None
    closest = ranking.closest
    if closest is not None and (ranking.lacks_memory or not closest.memory.host.fits):
        more = fewest_gpus(ranking.task, config=subject.config)
    text = nothing_fits(ranking)
    if more is not None:
        text += f"\nthe nearest number that something fits on is --gpus {more}"
    if asked.get("json"):
        found = {"fits": False, "reason": text, "gpus": more}
        found |= {"memory/peak_bytes": closest.peak_bytes if closest else None}
        print(json.dumps({**found, "host": closest.memory.host.as_json() if closest else None}))
    else:
        print(f"stepwell: {text}", file=sys.stderr)
    return 1


def cluster_of(asked: Asked) -> Cluster:
    """--cluster's or --gpu's machines. Raises ConfigError."""
    if "cluster" in asked.given and "gpu" in asked.given:
        raise ConfigError("--cluster names its GPU itself; leave --gpu out")
    if "cluster" in asked.given:
        return read_cluster(asked.given["cluster"])
    return cluster(asked.get("gpu", USUAL_GPU))


def gpus_of(asked: Asked) -> int:
    if "gpus" not in asked.given:
        raise ConfigError("how many GPUs? give --gpus N")
    return asked.given["gpus"]


# --- a recipe: as configured -----------------------------------------------------------------


def _recipe(asked: Asked) -> int:
    path = find_recipe(str(asked.recipe))
    run, assumed = Run.load(path, asked.overrides), ()
    pinned = asked.pins.given()
    if pinned:
        raise ConfigError(
            f"{', '.join(pinned)}: a recipe says itself what its layout is; set its keys instead "
            "(--layout.tp 8), or plan its model with --model"
        )
    if asked.get("model"):
        run = on_model(run, asked.get("model"))
    elif run.model.init is not None:  # the weights say how large the model is; torch reads them
        run, assumed = _with_weights(run)
    machines = cluster_of(asked)
    _check_ranks(asked, run)
    world = asked.get("gpus", fewest_ranks(run.layout))
    check_run(run, world)
    method = _method_of(run, world, machines)
    job = job_of(run, world, machines, run.name) if method is None else method.job
    prices = Prices(job.dims, machines, run.model)
    task = Task(job.dims, machines, world, run.data.seq_len, job.layout.global_batch_rows)
    candidate = Candidate(job, prices.memory(job.layout), prices.time(job.layout))
    candidate = plan_exactly(candidate, with_rows(run, task.rows), world)
    measured = gap_of(asked, job, run.model, run)
    if measured is not None and method is not None:
        measured = measured.without_knobs()
    known, fastest, quick = (measured, prices, candidate, task), None, bool(asked.get("quick"))
    if not quick and run.method.kind == "pretrain" and not run.lora.rank:
        fastest = fastest_of(*known)
    review = Review(
        run=run,
        task=task,
        candidate=candidate,
        knobs=knobs_of(*known, run, method),
        together=() if quick else knobs_of(*known, run, method, in_turn=True),
        fastest=fastest,
        gap=measured,
        assumed=(
            *assumed,
            *_of_step(run, task.rows),
            *_assumed(asked, world),
            *_assumed_of_machine(candidate),
        ),
        method=method,
    )
    if "write" in asked.given:
        if fastest is None:
            raise ConfigError("--write writes the fastest layout found, and none was (see --quick)")
        write_recipe(Path(asked.given["write"]), Subject(job.dims, run.model), fastest)
    if "html" in asked.given:
        _page(asked, review)
    dry = run if asked.get("dry-run") else None
    if asked.get("json"):
        _print_json(review_json(review), dry, world, machines)
    else:
        plan_text.show(plan_text.reviewed(review))
        _show_dry_run(dry, world, machines)
    return 0 if review.fits else 1


def _check_ranks(asked: Asked, run: Run) -> None:
    """Raises ConfigError where nothing says how many ranks a measured run had."""
    folder = asked.get("measured")
    if "gpus" in asked.given or run.layout.dp_shard > 0:
        return
    if isinstance(folder, Path) and folder.is_dir():
        raise ConfigError(
            f"--measured {folder}: its run.toml leaves the number of ranks open (layout.dp_shard="
            f"{run.layout.dp_shard}); say how many it had: --gpus N"
        )


def with_rows(run: Run, rows: int) -> Run:
    """A step of so many rows, also of a method whose steps are made of something else."""
    train = run.train.model_copy(update={"global_batch_rows": rows})
    return run.model_copy(update={"train": train})


def _method_of(run: Run, world: int, machines: Cluster) -> Evaluated | None:
    """All models of a method and its whole step."""
    from stepwell.plan.methods.recipes import as_configured

    return as_configured(run, world, machines, run.name)


def on_model(run: Run, name: str) -> Run:
    """The run with another model's dimensions, from scratch. Raises ConfigError."""
    subject = find_model(name)
    if subject.config is None:
        raise ConfigError(f"--model {name}: the engine does not have {subject.missing} yet")
    model = subject.config.model_dump(exclude_none=True, exclude_unset=True)
    model |= {"head": run.model.head, "num_labels": run.model.num_labels}
    model["max_seq_len"] = max(subject.config.max_seq_len, run.data.seq_len)
    return Run.parse({**run.model_dump(exclude_none=True), "model": model})


def _with_weights(run: Run) -> tuple[Run, tuple[str, ...]]:
    """As large as its weights; where they are not there yet, as the recipe says. And what is
    assumed."""
    try:
        return with_weights(run), ()
    except StepwellError as error:
        init = run.model.init
        told = {"num_layers", "d_model"} <= run.model.model_fields_set
        if told and init is not None and not Path(init).exists():
            model = run.model.model_dump(exclude_none=True, exclude_unset=True) | {"init": None}
            said = f"the recipe's dimensions, for model.init={init!r} is not there (--model NAME)"
            return Run.parse({**run.model_dump(exclude_none=True), "model": model}), (said,)
        raise type(error)(f"{error}; or say how large it is: --model NAME") from error


def plan_exactly(candidate: Candidate, run: Run, world: int) -> Candidate:
    """With the ledger of the run itself."""
    from stepwell.plan.memory.host import host_memory
    from stepwell.plan.memory.ledger import predict_memory

    host = host_memory(run, world, candidate.job.cluster)
    return candidate.with_ledger(predict_memory(run, world, device="cuda"), host)


def _of_step(run: Run, rows: int) -> tuple[str, ...]:
    """Of a method whose steps are made of something else: what its rows are, and what the figures
    are of."""
    method = run.method
    if isinstance(method, SampledMethod):
        work = workload_of(run)
        answers = f"{count_of(work.answers, 'answer')} to {count_of(work.prompts, 'prompt')}"
        what = f"{answers}, as long as they may be; {packed_text(rows, work)}"
    elif isinstance(method, DPO):
        what = f"{count_of(method.pairs_per_step, 'pair')} of answers a step, each filling a row"
    else:
        return ()
    return what, (
        "memory, a step and knobs are of all models and the whole step; where the time goes, and "
        "what a GPU sends, are of one training pass of the policy"
    )


def _assumed(asked: Asked, world: int) -> tuple[str, ...]:
    found = []
    if "gpus" not in asked.given:
        many = "one GPU" if world == 1 else f"{world} GPUs"
        found.append(f"{many}, the fewest that the layout fits (--gpus)")
    if "gpu" not in asked.given and "cluster" not in asked.given:
        found.append(f"{USUAL_GPU} in its usual machines (--gpu, --cluster)")
    return tuple(found)


# --- other questions -------------------------------------------------------------------------


def _zero_table(asked: Asked, subject: Subject) -> int:
    from stepwell.plan.methods.zero import zero_table

    seq_len = asked.get("seq-len", USUAL_SEQ_LEN)
    table = zero_table(subject.dims, cluster_of(asked), asked.get("gpus", 8), seq_len=seq_len)
    _print(asked, table, subject.assumed)
    return 0 if any(row.fits for row in table.rows) else 1


def _validate(asked: Asked) -> int:
    from stepwell.plan.calibration.validation import validate

    found = validate(asked.given["validate"])
    _print(asked, found)
    return 0 if found.predictions else DataError.exit_code


def _print(asked: Asked, answer: Any, assumed: Sequence[str] = ()) -> None:
    """As JSON, or in lines; first what nobody said of the model."""
    if asked.get("json"):
        print(json.dumps({**answer.as_json(), **_assumed_json(assumed)}))
    else:
        print("\n".join([*(f"assumed: {what}" for what in assumed), *answer.lines()]))


def _assumed_json(assumed: Sequence[str]) -> dict[str, list[str]]:
    return {"assumed": list(assumed)} if assumed else {}


def _page(asked: Asked, answer: Searched | Review) -> None:
    from stepwell.plan.explain.page import write_page

    write_page(answer, Path(asked.given["html"]))


def write_recipe(path: Path, subject: Subject, best: Candidate) -> None:
    """A recipe with the layout, whole or not at all. Raises ConfigError for a model that the engine
    does not have."""
    if subject.config is None:
        raise ConfigError(f"--write: the engine does not have {subject.missing} yet")
    exact = as_run(best, subject.config).exact
    assert exact is not None
    values = values_of(subject.config, best.layout, path.stem)
    longer = _longer(subject, best.layout.seq_len)
    head = (
        f"# {best.layout.num_gpus} x {best.job.cluster.name}, planned: {best.step_s:.2f} s a step, "
        f"MFU {100 * best.step.mfu:.1f} %, {best.peak_bytes / 2**30:.1f} GiB a GPU.\n"
        f"# {exact.peak_bytes / 2**30:.1f} GiB of them are tensors, as `stepwell pretrain --check` "
        "says; the rest is\n# fragmentation, the driver's context and communicators' buffers.\n"
        "# Still to say: data.sources and data.tokenizer, optim, train.steps.\n"
    )
    for said in (how_to_start(best.layout), f"It has {longer}." if longer else ""):
        if said:
            head += textwrap.fill(said, 100, initial_indent="# ", subsequent_indent="# ") + "\n"
    write_text(path, head + tomli_w.dumps(values))


def check_writable(option: str, path: Path) -> None:
    """Before a search is spent on it. Folders are made where they are missing. Raises
    ConfigError."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give a file in it")
    above = next(p for p in path.absolute().parents if p.exists())
    if not above.is_dir():
        raise ConfigError(f"{option} {path}: {above} is a file, not a folder")
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: {above} cannot be written to ({error.strerror}); give another place"
        ) from error


def _method(asked: Asked, subject: Subject) -> int:
    from stepwell.plan.methods.methods import plan_method

    method = asked.given["method"]
    if subject.config is None:
        raise ConfigError(f"--method {method}: the engine does not have {subject.missing} yet")
    machines = cluster_of(asked)
    given = {field: asked.given[name] for name, field in WORKLOAD.items() if name in asked.given}
    if "global-batch-tokens" in asked.given:
        given["rows"] = rows_of(asked)
    found = plan_method(
        method,
        subject.config,
        machines,
        gpus_of(asked),
        usual_workload(method, given) if given else None,
        name=subject.name,
        lora_rank=asked.get("lora-rank", 16),
        pins=asked.pins,
    )
    if "write" in asked.given:
        write_method(Path(asked.given["write"]), found, subject.config, machines)
    if "html" in asked.given:
        _method_page(asked, found)
    dry = None
    if asked.get("dry-run"):
        from stepwell.plan.methods.recipes import recipe

        dry = Run.parse(recipe(found, subject.config, "planned", "--dry-run"))
    trainers = found.chosen.trainers if found.chosen is not None else 0
    longer = _longer(subject, asked.get("seq-len", 0))
    assumed = (*subject.assumed, *([longer] if longer else []))
    if asked.get("json"):
        answer = {**found.as_json(), **_assumed_json(assumed)}
        _print_json(answer, dry, trainers, machines)
    else:
        _print(asked, found, assumed)
        _show_dry_run(dry, trainers, machines)
    return 0 if found.fits or found.nearest is not None else 1


def _method_page(asked: Asked, plan: MethodPlan) -> None:
    from stepwell.plan.methods.page import write_page

    write_page(plan, Path(asked.given["html"]))


def write_method(path: Path, plan: MethodPlan, model: ModelConfig, machines: Cluster) -> None:
    """A recipe for what the plan has chosen, whole or not at all. Raises ConfigError where no
    recipe says it."""
    from stepwell.plan.methods.recipes import heading, recipe

    write_text(path, heading(plan, machines) + tomli_w.dumps(recipe(plan, model, path.stem)))


def rows_of(asked: Asked) -> int:
    """Of a step of a method that does not sample. Raises ConfigError for less than one."""
    seq_len, tokens = asked.get("seq-len", Workload.seq_len), asked.given["global-batch-tokens"]
    if tokens < seq_len:
        raise ConfigError(
            f"--global-batch-tokens {tokens:,} has no row of {seq_len:,} tokens; the nearest is "
            f"--global-batch-tokens {seq_len}"
        )
    return round(tokens / seq_len)


def usual_workload(method: str, given: dict[str, int]) -> Workload:
    """The method's usual work with the values that were given."""
    usual = {"prompts": 512, "group_size": 1} if method == "ppo" else {}
    return Workload(**{**usual, **given})
