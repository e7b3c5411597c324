"""Groups of sampled answers with their rewards: what a policy-gradient step learns from.

Token in, token out: ids and log-probabilities are kept as sampled, never rendered again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stepwell.eval.grade import Prompt, Verdict, Verifier, verify_each
from stepwell.files import whole_file
from stepwell.generate import Sampling
from stepwell.posttrain.sampling.environments import Factory
from stepwell.posttrain.sampling.episodes import Episode, Sampler, sample_episodes
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, DataError


class Scorer(Protocol):
    """What completions are scored by: one verdict each, in their order."""

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[Verdict]: ...


@dataclass(frozen=True)
class ByVerifier:
    """A verifier alone as the reward, tried one by one (`grade.verify_each`)."""

    verifier: Verifier
    timeout_s: float = 10.0

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        return verify_each(
            self.verifier,
            [prompt.text for prompt in prompts],
            [completion.text for completion in completions],
            [prompt.columns for prompt in prompts],
            self.timeout_s,
        )


@dataclass(frozen=True)
class Group:
    """The answers to one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def rewards(self) -> list[float | None]:
        return [v.reward for v in self.verdicts]


@dataclass(frozen=True)
class Rollouts:
    groups: tuple[Group, ...]

    @property
    def policy_version(self) -> int:
        """The weights' version that sampled them. Raises DataError if there are several."""
        versions = {c.policy_version for g in self.groups for c in g.completions}
        if len(versions) != 1:
            raise DataError(f"rollouts of policy versions {sorted(versions)}, not of one")
        return versions.pop()

    def staleness(self, version: int) -> int:
        """How many updates the oldest rollout lags behind `version`."""
        return version - min(c.policy_version for g in self.groups for c in g.completions)

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a completion, for people and for metrics; with an environment also `turns`,
        who said what."""
        return [
            {
                "prompt": group.prompt.text,
                "completion": completion.text,
                **({"turns": _messages(completion)} if completion.turns else {}),
                "reward": verdict.reward,
                "scores": dict(verdict.scores),
                "failure": verdict.failure,
                "detail": verdict.detail,
                "num_tokens": sum(completion.mask),
                "finish_reason": completion.finish_reason,
                "policy_version": completion.policy_version,
            }
            for group in self.groups
            for completion, verdict in zip(group.completions, group.verdicts, strict=True)
        ]

    def documents(self) -> list[tuple[list[int], list[int], dict[str, list[float]]]]:
        """(ids, mask, streams) of each completion, group by group: prompt and answer, 1 on the
        tokens that the policy sampled (0 on the prompt's and an environment's); the stream
        `sampler_logprobs` is what the sampler saw, 0 elsewhere."""
        return [
            (
                [*c.prompt_ids, *c.token_ids],
                [0] * len(c.prompt_ids) + c.mask,
                {"sampler_logprobs": [0.0] * len(c.prompt_ids) + list(c.logprobs)},
            )
            for g in self.groups
            for c in g.completions
        ]

    @property
    def num_environment_failures(self) -> int:
        """Samples whose environment raised or took too long."""
        kinds = ("environment_error", "environment_timeout")
        return sum(v.failure in kinds for g in self.groups for v in g.verdicts)

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """One group a line, whole or not at all; `load` gives an equal value. about: a first line,
        which `about` reads again."""
        with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            if about is not None:
                file.write(json.dumps({"about": about}) + "\n")
            for group in self.groups:
                file.write(json.dumps(dataclasses.asdict(group)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: str | Path) -> Rollouts:
        """Raises DataError for a missing file and names the line of a broken one."""
        try:
            lines = Path(path).read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read rollouts {path}: {error}") from error
        groups = []
        if lines[-1]:
            raise DataError(f"{path}, line {len(lines)} is not a group of rollouts: it is cut off")
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                if number > 1 or "about" not in row:
                    groups.append(_group(row))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, line {number} is not a group of rollouts: {error}") from (
                    error
                )
        return cls(tuple(groups))


def about(path: Path) -> Any:
    """The `about` that rollouts were saved with; None without one, or without the file."""
    try:
        with path.open("rb") as file:
            return json.loads(file.readline()).get("about")
    except (FileNotFoundError, ValueError, AttributeError):
        return None


def collect(
    engine: Sampler,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    rewards: Scorer,
    tokenizer: Tokenizer,
    seed: int = 0,
    environment: Factory | None = None,
    max_turns: int = 1,
    max_len: int | None = None,
    timeout_s: float = 10.0,
) -> Rollouts:
    """`group_size` answers to each prompt, on the engine's weights as they are now, scored.

    An answer's seed is drawn from (seed, the prompt's ids, its number in the group), so the same
    prompt gets the same answers whichever rank or place in the list it has. environment, max_turns,
    max_len, timeout_s: as in `sample_episodes`. Every rank must call it together. Raises
    ConfigError for group_size < 1 and for prompts the model can't continue.
    """
    episodes = sample_episodes(
        engine,
        prompts,
        group_size,
        sampling,
        tokenizer,
        seed,
        environment,
        max_turns,
        max_len,
        timeout_s,
    )
    return scored(prompts, group_size, episodes, rewards)


def scored(
    prompts: Sequence[Prompt], group_size: int, episodes: Sequence[Episode], rewards: Scorer
) -> Rollouts:
    """Groups of episodes with their verdicts. Those that an environment failed are not scored."""
    owners = [prompt for prompt in prompts for _ in range(group_size)]
    whole = [i for i, episode in enumerate(episodes) if episode.failure is None]
    known: dict[int, Verdict] = {}
    if whole:
        completions = [episodes[i].completion for i in whole]
        found = rewards.score([owners[i] for i in whole], completions)
        known = dict(zip(whole, found, strict=True))
    verdicts = [e.verdict(known.get(i, Verdict(None))) for i, e in enumerate(episodes)]
    cuts = range(0, len(owners), group_size)
    return Rollouts(
        tuple(
            Group(
                prompt,
                tuple(e.completion for e in episodes[a : a + group_size]),
                tuple(verdicts[a : a + group_size]),
            )
            for prompt, a in zip(prompts, cuts, strict=True)
        )
    )


def _group(row: dict[str, Any]) -> Group:
    prompt = row["prompt"]
    return Group(
        Prompt(prompt["text"], tuple(prompt["ids"]), prompt["columns"], prompt["item"]),
        tuple(_completion(c) for c in row["completions"]),
        tuple(Verdict(**_with_tuples(v)) for v in row["verdicts"]),
    )


def _completion(row: dict[str, Any]) -> Completion:
    turns = tuple((role, text) for role, text in row.get("turns", ()))
    return Completion(**{**_with_tuples(row), "turns": turns})


def _messages(completion: Completion) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in completion.turns]


def _with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
