"""How a run is trained: the section `method`, one class a method.

Class variables say what a method's steps are made of, so that rules about runs need not list
methods: `row_steps`, a step takes train.global_batch_rows rows; `step_key`, the key that says of
how many units it is made; `evaluates`, held-out data are scored during training; `heldout_rows`,
these may be rows like those of data.path; `shows_loss`, the loss says how training goes;
`loss_in_nats`, it is a token's negative log-likelihood, with what [loss] adds; `orders`, the values
of data.order that it knows; `masks_windows`, its rows are windows of token stores, in which
data.document_mask may be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stepwell.schema import (
    Above0,
    AtLeast0,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Section,
    check_idle,
)
from stepwell.sections.chat import ChatColumns, ChatFormat, ChatRole, RoleNames
from stepwell.sections.preference import PairsLoss, PreferenceLoss
from stepwell.sections.rewards import RewardTerm


class MethodSection(Section):
    row_steps: ClassVar[bool] = False
    step_key: ClassVar[str] = "train.global_batch_rows"
    evaluates: ClassVar[bool] = False
    heldout_rows: ClassVar[bool] = False
    shows_loss: ClassVar[bool] = True
    loss_in_nats: ClassVar[bool] = False
    orders: ClassVar[tuple[str, ...]] = ("shuffled",)
    masks_windows: ClassVar[bool] = False

    @property
    def units_per_step(self) -> int | None:
        """What step_key says; None where it is no key of the method's own."""
        section, _, key = self.step_key.partition(".")
        return getattr(self, key) if section == "method" else None


class Pretrain(MethodSection):
    row_steps: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True
    loss_in_nats: ClassVar[bool] = True
    orders: ClassVar[tuple[str, ...]] = ("shuffled", "sequential", "quality-ascending")
    masks_windows: ClassVar[bool] = True

    kind: Literal["pretrain"] = "pretrain"


class SFT(MethodSection):
    """epochs bounds the run together with train.steps: whichever ends first (None: steps only).
    neftune_alpha: noise on the embeddings while training (NEFTune, 2310.05914; 0: none).
    format, columns, roles: how rows are read (docs/chat-data.md). train_on: the roles whose
    messages are trained; last_turn_only: of these only the last one of a conversation."""

    row_steps: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True
    heldout_rows: ClassVar[bool] = True
    loss_in_nats: ClassVar[bool] = True
    orders: ClassVar[tuple[str, ...]] = ("shuffled", "sequential")

    kind: Literal["sft"] = "sft"
    epochs: Above0 | None = None
    max_rows: Positive | None = None
    neftune_alpha: AtLeast0 = 0.0
    format: ChatFormat = "auto"
    columns: ChatColumns = ChatColumns()
    roles: RoleNames = RoleNames()
    train_on: tuple[ChatRole, ...] = ("assistant",)
    last_turn_only: Flag = False

    @model_validator(mode="after")
    def _rules(self) -> SFT:
        if not self.train_on or len(set(self.train_on)) < len(self.train_on):
            raise ValueError(
                f"method.train_on={list(self.train_on)} must name at least one role, and none "
                "twice; the nearest legal value is "
                f"{list(dict.fromkeys(self.train_on)) or ['assistant']}"
            )
        if self.format != "auto":
            for table in (self.columns, self.roles):
                read = table.reads[self.format]
                idle = [name for name in table.named() if name not in read]
                if idle:
                    theirs = f"reads {', '.join(read)}" if read else "has no roles"
                    raise ValueError(
                        f"{table.table}.{idle[0]}={table.named()[idle[0]]!r} changes nothing with "
                        f"method.format={self.format!r}, which {theirs}; leave it out"
                    )
        return self


class DPO(MethodSection):
    """A step takes pairs_per_step pairs (kto: that many labelled answers). max_prompt_tokens:
    longer prompts lose their beginning; answers are cut to what data.seq_len leaves of a pair.

    reference: cached scores all pairs once before training and keeps the sums in a file; separate
    holds a frozen copy of the first weights; adapter-off scores with the adapters left out.
    reference_from: the folder of a run that scored the same pairs with the same weights; its sums
    are taken. displacement: what is done when margins grow while the chosen answers'
    log-probability falls (2410.08847) over displacement_window steps. ches: scores every pair
    before training (2410.08847, definition 2) and writes ches.jsonl. drop_ches: the share of pairs
    with the highest CHES scores that is left out.
    """

    step_key: ClassVar[str] = "method.pairs_per_step"
    evaluates: ClassVar[bool] = True
    heldout_rows: ClassVar[bool] = True

    kind: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = PreferenceLoss()
    pairs_per_step: Positive = 16
    epochs: Above0 | None = None
    max_rows: Positive | None = None
    max_prompt_tokens: Positive | None = None
    reference: Literal["cached", "separate", "adapter-off"] = "cached"
    reference_from: str | None = None
    displacement: Literal["warn", "stop", "ignore"] = "warn"
    displacement_window: Annotated[int, Field(strict=True, ge=4)] = 20
    ches: Flag = False
    drop_ches: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _rules(self) -> DPO:
        kind = self.loss.kind
        if kind == "kto" and self.pairs_per_step < 2:
            raise ValueError(
                f"method.pairs_per_step={self.pairs_per_step}: kto estimates its KL term from "
                "answers to other prompts of the step's batch, so it needs at least 2 rows; the "
                "nearest legal value is 2"
            )
        if kind == "kto" and (self.ches or self.drop_ches):
            key = "ches" if self.ches else "drop_ches"
            raise ValueError(
                f"method.{key}={getattr(self, key)!r} compares the two answers of a pair, and kto "
                "has labelled answers; leave it out"
            )
        if kind == "kto":
            where = "in kind 'kto', whose answers are not paired"
            check_idle(self, "method", ("displacement", "displacement_window"), where)
        if not self.loss.needs_reference and self.reference != "cached":
            raise ValueError(
                f"method.reference={self.reference!r} changes nothing in kind {kind!r}, which "
                "compares with no reference; leave it at 'cached' (nothing is scored)"
            )
        if not self.loss.needs_reference and self.reference_from is not None:
            raise ValueError(
                f"method.reference_from={self.reference_from!r} changes nothing in kind {kind!r}, "
                "which compares with no reference; leave it out"
            )
        if self.reference_from is not None and self.reference != "cached":
            raise ValueError(
                f"method.reference_from={self.reference_from!r} holds cached sums, but "
                f"method.reference={self.reference!r} scores anew in every step; leave it out, or "
                "set method.reference='cached'"
            )
        if self.displacement == "ignore":
            check_idle(self, "method", ["displacement_window"], "with method.displacement='ignore'")
        return self


class RewardModel(MethodSection):
    """A score for an answer, read at its last token.

    bradley-terry: pairs; -log sigmoid(chosen - rejected - margin), the margin from the column
    `margin` if margins is set; centre_coef times the square of the pair's sum is added
    (2312.09244). regression: rows with a number `label`; classification: rows with a class `label`
    of model.num_labels (one: true or false). process: rows of `completions` and `labels`, one a
    step; a step's score is read at its last token, which ends in step_separator; soft labels are
    probabilities; model.num_labels is 1, or 2 for the classes wrong and right. max_length: of a
    document (prompt and answer), the end of an answer is cut; max_prompt_tokens: longer prompts
    lose their beginning. A pair must fit data.seq_len.
    """

    step_key: ClassVar[str] = "method.rows_per_step"
    evaluates: ClassVar[bool] = True
    heldout_rows: ClassVar[bool] = True
    orders: ClassVar[tuple[str, ...]] = ("shuffled", "sequential")

    kind: Literal["reward"] = "reward"
    objective: Literal["bradley-terry", "regression", "classification", "process"] = "bradley-terry"
    margins: Flag = False
    centre_coef: AtLeast0 = 0.0
    rows_per_step: Positive = 16
    epochs: Above0 | None = None
    max_rows: Positive | None = None
    max_length: Annotated[int, Field(strict=True, ge=2)] | None = None
    max_prompt_tokens: Positive | None = None
    step_separator: str = "\n"

    @model_validator(mode="after")
    def _rules(self) -> RewardModel:
        for key in ("margins", "centre_coef"):
            if self.objective != "bradley-terry" and getattr(self, key):
                raise ValueError(
                    f"method.{key}={getattr(self, key)} belongs to pairs, objective "
                    f"'bradley-terry', not {self.objective!r}; leave it out"
                )
        if not self.step_separator:
            raise ValueError("method.step_separator is empty; a line's end, '\\n', is usual")
        if self.step_separator != "\n" and self.objective != "process":
            raise ValueError(
                f"method.step_separator={self.step_separator!r} belongs to objective 'process', "
                f"not {self.objective!r}; leave it out"
            )
        cut, longest = self.max_prompt_tokens, self.max_length
        if cut is not None and longest is not None and cut >= longest:
            raise ValueError(
                f"method.max_prompt_tokens={cut} leaves no room for an answer in "
                f"method.max_length={longest}; the nearest legal value is {longest - 1}"
            )
        return self


class SampledMethod(MethodSection):
    """What methods share that train on their own samples.

    A step samples group_size answers to each of prompts_per_step prompts (over all ranks) at
    `temperature` from the whole distribution, and scores them by `rewards`, or by `verifier` alone
    where there are none. self_test: the scorers are tried on junk before the run starts.
    environment: calculator or python:FILE.py:CLASS, for answers of up to max_turns turns. server:
    the URL of an OpenAI-compatible server that samples instead of the engine; server_weights: the
    folder that it loads its model from, which gets every new version of the weights. max_staleness:
    how many rollouts the sampling weights may lag behind; above 0, sampling goes on while training.
    importance_cap: truncates the ratio of the trainer's to the sampler's probability (Ionides 2008;
    0: no correction). updates_per_rollout: how often the answers are gone through, in `minibatches`
    steps each time. overopt: whether rewards that a model has learnt are watched for
    over-optimisation (posttrain/overoptimisation/detector.py), by the run's first and last
    overopt_window rollouts, and whether an alarm ends the run. kl_budget: nats an answer that the
    policy may go from the reference (0: any); beyond it the run stops, or kl_coef is raised
    (over_budget).
    """

    step_key: ClassVar[str] = "method.prompts_per_step"
    shows_loss: ClassVar[bool] = False

    prompts_per_step: Positive = 16
    group_size: Positive = 8
    max_new_tokens: Positive = 64
    temperature: Above0 = 1.0
    verifier: str = "exact"
    rewards: tuple[RewardTerm, ...] = ()
    reward_timeout_s: Above0 = 10.0
    self_test: Flag = True
    environment: str | None = None
    max_turns: Positive = 1
    server: str | None = None
    server_weights: str | None = None
    max_staleness: NonNegative = 0
    importance_cap: AtLeast0 = 2.0
    updates_per_rollout: Positive = 1
    minibatches: Positive = 1
    overopt: Literal["warn", "stop", "ignore"] = "warn"
    overopt_window: Annotated[int, Field(strict=True, ge=3)] = 10
    kl_budget: AtLeast0 = 0.0
    over_budget: Literal["stop", "raise"] = "stop"

    @model_validator(mode="after")
    def _shared_rules(self) -> SampledMethod:
        names = [term.name for term in self.rewards]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"method.rewards has two terms named {twice!r}; each needs a name of its own"
            )
        if self.rewards and self.verifier != "exact":
            raise ValueError(
                f"method.verifier={self.verifier!r} changes nothing beside method.rewards, which "
                "say what the reward is; leave it out, or add a term with that source"
            )
        if self.overopt == "ignore":
            check_idle(self, "method", ["overopt_window"], "with method.overopt='ignore'")
        if self.max_turns > 1 and self.environment is None:
            raise ValueError(
                f"method.max_turns={self.max_turns} needs method.environment, which answers "
                "between the turns; the nearest legal value is 1"
            )
        if self.server_weights is not None and self.server is None:
            raise ValueError(
                f"method.server_weights={self.server_weights!r} is where a server loads its "
                "weights from, and there is no method.server; set it, or leave both out"
            )
        if self.server_weights is not None and self.max_staleness > 0:
            raise ValueError(
                f"method.max_staleness={self.max_staleness} samples ahead, and a server with new "
                "weights (method.server_weights) would change them under a rollout; the nearest "
                "legal value is 0"
            )
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"method.minibatches={self.minibatches} exceeds method.prompts_per_step="
                f"{self.prompts_per_step}; the nearest legal value is {self.prompts_per_step}"
            )
        return self


def check_no_reference(method: GRPO | PPO) -> None:
    """Raises ValueError for what is said of a divergence that is neither trained nor measured."""
    if not method.kl_coef:
        keys = ("kl_estimator", "kl_in", "reference")
        check_idle(method, "method", keys, "with method.kl_coef=0, where no reference is held")


def check_budget(method: GRPO | PPO) -> None:
    """Raises ValueError for a budget that nothing measures, or that two things would keep."""
    if method.kl_budget and not method.kl_coef:
        raise ValueError(
            f"method.kl_budget={method.kl_budget:g} bounds the divergence from a reference, and "
            "with method.kl_coef=0 there is none; the nearest is a small one, method.kl_coef=1e-6"
        )
    if method.over_budget == "raise" and not method.kl_budget:
        raise ValueError(
            "method.over_budget='raise' acts where the divergence exceeds method.kl_budget, which "
            "is 0 (none); set it to the nats an answer that are allowed"
        )


def check_bounds(method: GRPO | PPO, usual: Mapping[str, float]) -> None:
    """Raises ValueError for another bound of the ratio than the usual one where a rollout has only
    one step, in which the ratio is exactly 1."""
    if method.updates_per_rollout * method.minibatches > 1:
        return
    for key, default in usual.items():
        if getattr(method, key) != default:
            raise ValueError(
                f"method.{key}={getattr(method, key):g} changes nothing with one step a rollout "
                "(method.updates_per_rollout=1, method.minibatches=1), where every ratio is "
                "exactly 1; leave it out, or set method.updates_per_rollout=2"
            )


Estimator = Literal["k1", "k2", "k3", "unbiased"]
# Its ratios are those of whole answers, means over their tokens, and stay close to 1 (2507.18071,
# section 5.1).
GSPO_CLIPS = {"clip_low": 3e-4, "clip_high": 4e-4}


class GRPO(SampledMethod):
    """Group-relative policy optimisation (2402.03300) and its relatives.

    advantage: std, the group's sample standard deviation; population-std; none (Dr. GRPO,
    2503.20783); batch-std (2508.08221); leave-one-out (RLOO, 2402.14740); reinforce++ (2501.03262);
    maxrl, by the group's mean reward (2602.02710). aggregate: mean over all tokens (DAPO,
    2503.14476), over answers, or by the constant max_new_tokens (Dr. GRPO). objective: clip
    (PPO's), cispo (2506.13585), gspo (2507.18071), whose bounds are by default GSPO_CLIPS.
    dual_clip: 0, or the bound c > 1 of 1912.09729.
    kl_coef: of the divergence from the reference, in the loss or the reward (there summed over an
    answer's tokens). entropy_coef: of the entropy that is added. overlong: mask leaves answers out
    of the loss that were cut off; overlong_cache: answers are punished for the last so many tokens
    before max_new_tokens, linearly up to -1 (0: none). dynamic_sampling: groups of equal rewards
    are replaced by others, in at most max_refills further rollouts. reference: as in ppo.
    """

    kind: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(strict=True, ge=2)] = 8
    advantage: Literal[
        "std", "population-std", "none", "batch-std", "leave-one-out", "reinforce++", "maxrl"
    ] = "std"
    aggregate: Literal["token", "sequence", "constant"] = "token"
    objective: Literal["clip", "cispo", "gspo"] = "clip"
    clip_low: Fraction = 0.2
    clip_high: Above0 = 0.28
    dual_clip: AtLeast0 = 0.0
    kl_coef: AtLeast0 = 0.0
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    reference: Literal["separate", "adapter-off", "host"] = "separate"
    entropy_coef: AtLeast0 = 0.0
    overlong: Literal["keep", "mask"] = "keep"
    overlong_cache: NonNegative = 0
    dynamic_sampling: Flag = False
    max_refills: Positive = 3

    @model_validator(mode="before")
    @classmethod
    def _clips_of_gspo(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("objective") == "gspo":
            return {**GSPO_CLIPS, **values}
        return values

    @model_validator(mode="after")
    def _rules(self) -> GRPO:
        check_budget(self)
        if not self.dynamic_sampling:
            check_idle(self, "method", ["max_refills"], "without method.dynamic_sampling")
        if 0 < self.dual_clip <= 1:
            raise ValueError(
                f"method.dual_clip={self.dual_clip:g} must be above 1 (3 is usual), or 0 for none"
            )
        if self.dual_clip and self.objective == "cispo":
            raise ValueError(
                f"method.dual_clip={self.dual_clip:g} bounds clipped objectives, and "
                "method.objective='cispo' is none; the nearest legal value is 0"
            )
        check_bounds(self, self._usual_bounds())
        if self.kl_in == "reward" and self.kl_estimator == "unbiased":
            raise ValueError(
                "method.kl_estimator='unbiased' is a term of the loss; with method.kl_in='reward' "
                "take 'k1', whose policy gradient is the divergence's"
            )
        if self.overlong_cache > self.max_new_tokens:
            raise ValueError(
                f"method.overlong_cache={self.overlong_cache} exceeds method.max_new_tokens="
                f"{self.max_new_tokens}; the nearest legal value is {self.max_new_tokens}"
            )
        check_no_reference(self)
        return self

    def _usual_bounds(self) -> dict[str, float]:
        fields = type(self).model_fields
        usual = {key: fields[key].default for key in ("clip_low", "clip_high", "dual_clip")}
        return {**usual, **(GSPO_CLIPS if self.objective == "gspo" else {})}


class PPO(SampledMethod):
    """Proximal policy optimisation (1707.06347) with a critic, as in RLHF (2203.02155).

    critic: separate, a model of its own from critic_init (by default the policy's first weights),
    or shared, a second head on the policy's trunk. reference: separate, a frozen copy; adapter-off,
    the policy without its adapters; host, a frozen copy that lives on the host between rollouts.
    kl_coef: of the divergence from the reference, kept at kl_target over kl_horizon samples by the
    adaptive controller (1909.08593). gamma, lam: GAE (1506.02438). value_clip: 0, or how far a
    value may move from the sampled one. whiten: advantages are centred and scaled over the batch.
    truncated: an answer that was cut off at max_new_tokens keeps its reward less truncation_penalty
    (the EOS trick, 2403.17031), or (bootstrap) has the critic's value of where it was cut in place
    of a reward (1712.00378).
    """

    kind: Literal["ppo"] = "ppo"
    group_size: Positive = 1
    clip_low: Fraction = 0.2
    clip_high: Above0 = 0.2
    aggregate: Literal["token", "sequence", "constant"] = "token"
    critic: Literal["separate", "shared"] = "separate"
    critic_init: str | None = None
    critic_lr: Above0 | None = None
    value_coef: Above0 = 0.1
    value_clip: AtLeast0 = 0.2
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    whiten: Flag = True
    kl_coef: AtLeast0 = 0.05
    kl_estimator: Estimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    kl_target: Above0 = 6.0
    kl_horizon: Above0 = 10_000.0
    reference: Literal["separate", "adapter-off", "host"] = "separate"
    entropy_coef: AtLeast0 = 0.0
    truncated: Literal["penalty", "bootstrap"] = "penalty"
    truncation_penalty: AtLeast0 = 1.0

    @model_validator(mode="after")
    def _rules(self) -> PPO:
        check_budget(self)
        fields = type(self).model_fields
        check_bounds(self, {key: fields[key].default for key in ("clip_low", "clip_high")})
        if self.kl_controller == "fixed":
            check_idle(
                self, "method", ("kl_target", "kl_horizon"), "with method.kl_controller='fixed'"
            )
        if self.over_budget == "raise" and self.kl_controller == "adaptive":
            raise ValueError(
                "method.over_budget='raise' and method.kl_controller='adaptive' would both set the "
                "coefficient; with the controller, method.kl_target is the budget: leave "
                "method.over_budget at 'stop'"
            )
        if self.critic == "shared":
            keys = ("critic_init", "critic_lr")
            alone = next((key for key in keys if getattr(self, key) is not None), None)
            if alone is not None:
                raise ValueError(
                    f"method.{alone}={getattr(self, alone)!r} is a separate critic's, but "
                    "method.critic='shared' is a head on the policy's trunk; leave it out"
                )
        if self.kl_in == "reward" and self.kl_estimator == "unbiased":
            raise ValueError(
                "method.kl_estimator='unbiased' is about the gradient of a loss, but "
                "method.kl_in='reward'; the nearest legal value is 'k1', whose policy gradient is "
                "the reverse KL's there"
            )
        if self.kl_controller == "adaptive" and not self.kl_coef:
            raise ValueError(
                "method.kl_controller='adaptive' multiplies method.kl_coef, which is 0; set it to "
                "0.05, or method.kl_controller='fixed'"
            )
        usual = type(self).model_fields["truncation_penalty"].default
        if self.truncated == "bootstrap" and self.truncation_penalty != usual:
            raise ValueError(
                f"method.truncation_penalty={self.truncation_penalty:g} does not go with "
                "method.truncated='bootstrap', where the critic says what is to come; leave it out"
            )
        check_no_reference(self)
        return self


class OnlineDPO(SampledMethod):
    """Preference losses on pairs of the policy's own samples (2402.04792): each step samples,
    scores, pairs the best with the worst answer of a group, and trains.

    refresh_every: steps after which the reference becomes the
    policy of that moment (0: never), as iterative DPO has it (2404.19733). displacement,
    displacement_window: as in dpo, counted anew after a refresh. max_empty: rollouts in a row
    without a pair, after which the run ends. reference: as in ppo.
    """

    kind: Literal["online-dpo"] = "online-dpo"
    group_size: Annotated[int, Field(strict=True, ge=2)] = 4
    loss: PairsLoss = PairsLoss()
    reference: Literal["separate", "adapter-off", "host"] = "separate"
    refresh_every: NonNegative = 0
    displacement: Literal["warn", "stop", "ignore"] = "warn"
    displacement_window: Annotated[int, Field(strict=True, ge=4)] = 20
    max_empty: Positive = 10

    @model_validator(mode="after")
    def _rules(self) -> OnlineDPO:
        kind = self.loss.kind
        where = "in online-dpo, whose losses are of whole answers, without importance weights"
        check_idle(self, "method", ["importance_cap"], where)
        if self.displacement == "ignore":
            check_idle(self, "method", ["displacement_window"], "with method.displacement='ignore'")
        if self.over_budget == "raise":
            raise ValueError(
                "method.over_budget='raise' raises method.kl_coef, which online-dpo has not; the "
                "nearest legal value is 'stop' (method.loss.beta holds the policy)"
            )
        if self.kl_budget and not self.loss.needs_reference:
            raise ValueError(
                f"method.kl_budget={self.kl_budget:g} bounds the divergence from a reference, and "
                f"kind {kind!r} has none; the nearest legal value is 0"
            )
        if not self.loss.needs_reference and self.reference != "separate":
            raise ValueError(
                f"method.reference={self.reference!r} changes nothing in kind {kind!r}, which "
                "compares with no reference; leave it at 'separate' (there is none)"
            )
        if not self.loss.needs_reference and self.refresh_every:
            raise ValueError(
                f"method.refresh_every={self.refresh_every} renews a reference, and kind {kind!r} "
                "has none; the nearest legal value is 0"
            )
        if self.refresh_every and self.reference == "adapter-off":
            raise ValueError(
                f"method.refresh_every={self.refresh_every} does not go with "
                "method.reference='adapter-off': the policy without its adapters stays what it "
                "is; set method.reference='separate' or 'host', or method.refresh_every=0"
            )
        return self


Method = Annotated[
    Pretrain | SFT | DPO | RewardModel | GRPO | PPO | OnlineDPO, Field(discriminator="kind")
]
