"""Trained reward models at work: scores of documents, of their steps, and of several models as one.

K models, D documents, M places where a score is read, C labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch, padding
from stepwell.data.packing import best_fit, pack_rows, shortest
from stepwell.models.hf_reward import RewardNotes, read_hf_notes
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.reward_model.ensembles import (
    Combination,
    combine,
    disagreement,
    standardised,
)
from stepwell.posttrain.reward_model.losses import at_places, step_chance
from stepwell.posttrain.reward_model.rows import ROUND
from stepwell.sections.layout import LayoutConfig
from stepwell.sections.model import ModelConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train import run_checkpoints
from stepwell.train.engine import Engine
from stepwell.train.weights import check_tokenizer, initial_weights, kind_of, read_model
from stepwell.types import CheckpointError, ConfigError, DataError

MEAN, SD = "eval/score_mean", "eval/score_sd"


@dataclass(frozen=True)
class Member:
    """One frozen reward model. trailing_id: a token that does not count at a document's end, as in
    Transformers, which reads a score at the last token that is not the padding token. mean, sd: of
    its scores on held-out data, None where they are not known."""

    folder: str
    engine: Engine
    trailing_id: int | None = None
    mean: float | None = None
    sd: float | None = None


class Judged(NamedTuple):
    """What several models say together, how far apart they are ((D,) each), and what each of them
    says (K, D)."""

    scores: Tensor
    disagreement: Tensor
    members: Tensor


class Scorer:
    """Scores token ids. Each rank scores its own documents, without the others; only where a layout
    divides the models do all ranks have to call together.

    A document is the whole of prompt and answer (as it is rendered for training, with the token
    that ends it), and its score is read at its last token. Ids are of the reward model's tokenizer:
    texts of another one are encoded anew (`stepwell.data.sft_data.render_row`).
    """

    def __init__(
        self,
        members: Sequence[Member],
        seq_len: int,
        aggregate: Combination,
        k: float,
        together: bool = False,
    ):
        self.members, self.seq_len = tuple(members), seq_len
        self.aggregate: Combination = aggregate
        self.k = k
        self._together = together

    @property
    def standardises(self) -> bool:
        """Whether scores are brought to mean 0 and deviation 1 of held-out data before they are
        combined: where there are several models, and this is known of each."""
        known = all(m.mean is not None and m.sd is not None for m in self.members)
        return len(self.members) > 1 and known

    def score(self, docs: Sequence[Sequence[int]]) -> Tensor:
        """(D,) float32: each document's reward, by `aggregate` over the models.

        Raises DataError for a document that is empty or longer than seq_len.
        """
        return self.judged(docs).scores

    def disagreement(self, docs: Sequence[Sequence[int]]) -> Tensor:
        """(D,): the standard deviation of the models' scores; zero for a single model."""
        return self.judged(docs).disagreement

    def judged(self, docs: Sequence[Sequence[int]]) -> Judged:
        """`score` and `disagreement` in one pass."""
        scores_KD = self.member_scores(docs)
        together = combine(scores_KD, self.aggregate, self.k)
        return Judged(together, disagreement(scores_KD), scores_KD)

    def member_scores(self, docs: Sequence[Sequence[int]]) -> Tensor:
        """(K, D): what each model says, standardised if the scorer does. With two labels a score is
        the log-odds of the second."""
        scores_KD = torch.stack([_one_number(member.engine, s) for member, s in self._read(docs)])
        if not self.standardises:
            return scores_KD
        means_K = torch.tensor([float(m.mean or 0) for m in self.members])
        sds_K = torch.tensor([float(m.sd or 0) for m in self.members])
        return standardised(scores_KD, means_K, sds_K)

    def step_scores(
        self, docs: Sequence[Sequence[int]], step_ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """The chance that each step of each document is right, by `aggregate` over the models (of
        chances, which need no standardising). step_ends: places of the steps' last tokens."""
        check_ends(docs, step_ends)
        chances_KM = torch.stack(
            [step_chance(scores_MC) for _, scores_MC in self._read(docs, step_ends)]
        )
        chances_M = combine(chances_KM, self.aggregate, self.k).clamp(0, 1)
        parts = chances_M.split([len(ends) for ends in step_ends])
        return [part.tolist() for part in parts]

    def class_chances(self, docs: Sequence[Sequence[int]]) -> Tensor:
        """(K, D, C): each model's softmax over its labels (one label: the sigmoid of its score)."""
        found = []
        for member, scores_DC in self._read(docs):
            single = member.engine.run.model.num_labels == 1
            found.append(scores_DC.sigmoid() if single else scores_DC.softmax(-1))
        return torch.stack(found)

    def _read(
        self, docs: Sequence[Sequence[int]], ends: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[Member, Tensor]]:
        """Of each model its raw scores (M, C), in the documents' order."""
        found = []
        for member in self.members:
            wholes = docs if ends is not None else [_trimmed(d, member.trailing_id) for d in docs]
            places = [[len(d) - 1] for d in wholes] if ends is None else ends
            found.append((member, self._scores(member.engine, wholes, places)))
        return found

    def _scores(
        self,
        engine: Engine,
        docs: Sequence[Sequence[int]],
        ends: Sequence[Sequence[int]],
    ) -> Tensor:
        num_labels = engine.run.model.num_labels
        if not docs and not self._together:
            return torch.zeros(0, num_labels)
        check_lengths(docs, self.seq_len)
        batch, order = pack_documents(docs, ends, self.seq_len, whole_rows=self._together)
        found_MC = at_places(engine.scores(batch), batch)
        scores_MC = torch.empty_like(found_MC)
        scores_MC[order] = found_MC
        return scores_MC


def open_scorer(
    folders: Sequence[str],
    mesh: Mesh,
    seq_len: int,
    aggregate: Combination = "mean",
    k: float = 1.0,
    tokenizer: Tokenizer | None = None,
    compute: str = "bf16",
    layout: LayoutConfig | None = None,
) -> Scorer:
    """Reward models out of runs' folders (their last checkpoints), checkpoints, or folders of
    Transformers' sequence and token classifiers, frozen, in `compute` precision.

    aggregate, k: as in `reward_ensembles.combine`. tokenizer: the one that the documents come from;
    a model that is known to belong to another one is refused. layout: divides each model over the
    mesh's ranks (by default every rank holds all of them whole).
    Raises ConfigError for that, for a model without a score, for one whose scores are more than one
    number, and for an aggregate that needs more models; CheckpointError for what cannot be read.
    """
    combine(torch.zeros(len(folders), 1), aggregate, k)
    alone = Mesh(1, 0, 0, mesh.device)
    members = []
    for folder in folders:
        path, model = reward_model(folder, tokenizer)
        model = model.model_copy(update={"init": str(path)})
        run = Run.parse(
            {
                "model": model.model_dump(exclude_none=True),
                "layout": {} if layout is None else layout.model_dump(exclude_none=True),
                "precision": {"compute": compute},
                "data": {"seq_len": seq_len},
                "method": {"kind": "reward", "objective": "classification"},  # with any labels
            }
        )
        engine = Engine(run, initial_weights(model), alone if layout is None else mesh, frozen=True)
        notes = score_notes(path)
        members.append(Member(folder, engine, notes.pad_id, notes.mean, notes.sd))
    return Scorer(members, seq_len, aggregate, k, together=layout is not None)


def reward_model(
    folder: str | Path, tokenizer: Tokenizer | None = None
) -> tuple[Path, ModelConfig]:
    """Where the model is, and its dimensions. Raises CheckpointError where there is none, and
    ConfigError for one without a score and for one that is known to belong to another tokenizer."""
    path = reward_folder(folder)
    model = read_model(str(path))
    if model.head != "score":
        raise ConfigError(
            f"{folder} is no reward model (model.head={model.head!r}); "
            "train one from it with `stepwell reward`"
        )
    if tokenizer is not None:
        check_tokenizer(path, tokenizer)
    return path, model


def reward_folder(folder: str | Path) -> Path:
    """Where the model is that a reward's source names: a run's last checkpoint, or `folder` itself.
    Raises CheckpointError where there is none."""
    path = Path(folder)
    if run_checkpoints.is_run(path):
        return run_checkpoints.of_run_or_itself(path, "the reward model")
    if not any((path / name).is_file() for name in ("config.json", run_checkpoints.STATE)):
        raise CheckpointError(
            f"the reward model {str(folder)!r} is no model: give the folder of a run of `stepwell "
            "reward` (its last checkpoint), one of its checkpoints, or a Hugging Face folder of a "
            "classifier (config.json and safetensors)"
        )
    return path


def score_notes(path: Path) -> RewardNotes:
    """What is known of the scores of a run, a checkpoint or a Hugging Face folder."""
    if run_checkpoints.is_run(path):
        path = run_checkpoints.of_run_or_itself(path, "the reward model")
    if kind_of(str(path)) == "hf":
        return read_hf_notes(path)
    metrics = run_checkpoints.read_state(path).get("extra", {}).get("metrics", {})
    return RewardNotes(None, metrics.get(MEAN), metrics.get(SD))


def _one_number(engine: Engine, scores_DC: Tensor) -> Tensor:
    num_labels = engine.run.model.num_labels
    if num_labels > 2:
        raise ConfigError(
            f"a reward is one number, but this model scores {num_labels} classes; take one with "
            "one label, or with two (the log-odds of the second)"
        )
    return scores_DC[:, 0] if num_labels == 1 else scores_DC[:, 1] - scores_DC[:, 0]


def _trimmed(ids: Sequence[int], trailing_id: int | None) -> Sequence[int]:
    """Without `trailing_id` at the end; a document of nothing else keeps one."""
    stop = len(ids)
    while trailing_id is not None and stop > 1 and ids[stop - 1] == trailing_id:
        stop -= 1
    return ids[:stop]


def pack_documents(
    docs: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    seq_len: int,
    whole_rows: bool = False,
) -> tuple[Batch, Tensor]:
    """Documents packed with weight 1 at the places `ends`, and for each weighted place, in the
    batch's order, its number among all ends in the documents' order (int64 (M,)).

    Rows are shorter than seq_len where that is enough, unless whole_rows.
    """
    if not docs:
        return padding(0, seq_len), torch.zeros(0, dtype=torch.int64)
    lengths = [len(ids) for ids in docs]
    length = seq_len if whole_rows else shortest(lengths, seq_len, ROUND)
    rows = best_fit(lengths, length)
    marked = []
    for ids, places in zip(docs, ends, strict=True):
        mask = np.zeros(len(ids) + 1)
        mask[np.asarray(places, np.int64) + 1] = 1
        marked.append(([*ids, 0], mask))  # a token that is never looked at follows the last
    first = np.cumsum([0, *(len(places) for places in ends)])
    order = [first[i] + j for row in rows for i in row for j in range(len(ends[i]))]
    return pack_rows(marked, length, rows=rows), torch.tensor(order, dtype=torch.int64)


def check_lengths(docs: Sequence[Sequence[int]], seq_len: int) -> None:
    """Raises DataError for an empty document, and for one of more than seq_len tokens."""
    for i, ids in enumerate(docs):
        if not len(ids):
            raise DataError(f"document {i} has no token to read a score at")
        if len(ids) > seq_len:
            raise DataError(
                f"document {i} has {len(ids)} tokens, more than seq_len={seq_len}; cut it, or "
                f"raise seq_len to {len(ids)}"
            )


def check_ends(docs: Sequence[Sequence[int]], step_ends: Sequence[Sequence[int]]) -> None:
    """Raises DataError unless each document has steps that end in it, one after another."""
    if len(docs) != len(step_ends):
        raise DataError(f"{len(docs)} documents, but steps of {len(step_ends)}")
    for i, (ids, ends) in enumerate(zip(docs, step_ends, strict=True)):
        ascending = all(a < b for a, b in itertools.pairwise(ends))
        if not len(ends) or not ascending or ends[0] < 0 or ends[-1] >= len(ids):
            raise DataError(
                f"document {i} of {len(ids)} tokens has steps that end at {list(ends)[:8]}; ends "
                f"must ascend from 0 to at most {len(ids) - 1}"
            )
