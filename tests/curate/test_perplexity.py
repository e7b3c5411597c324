"""Scores of a small model that has learnt one text."""

import math
import shutil

import pytest
import torch
from pydantic import ValidationError

from stepwell.config import Run
from stepwell.curate.perplexity import Perplexity, load_scorer
from stepwell.data.batches import to_batch
from stepwell.data.store import StoreWriter
from stepwell.models.hf import save_hf
from stepwell.tokenizer import Tokenizer
from stepwell.train.pretrain import pretrain
from stepwell.types import CheckpointError, ConfigError, Document
from tests.models.test_decode import config, random_decoder

TEXT = "der Hund läuft über die Straße. the dog runs over the road. 123 + 456 = 579. "
TEXTS = [TEXT, TEXT * 9, "", "x", "The road is über 456.", TEXT[::-1] * 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder with a random model and its tokenizer."""
    root = tmp_path_factory.mktemp("perplexity")
    tokenizer = Tokenizer.train([TEXT * 15], 320)
    tokenizer.save(root / "tokenizer")
    cfg = config(vocab_size=tokenizer.vocab_size)
    decoder = random_decoder(cfg)
    save_hf(root / "hf", cfg, decoder.state_dict().items(), torch.float32,
            tokenizer=root / "tokenizer")  # fmt: skip
    return root / "hf"


def batch(*texts: str):
    return to_batch([Document(str(i), text, "s") for i, text in enumerate(texts)], 0)


def column(step, *texts: str, name: str = "bits_per_byte"):
    return step(batch(*texts)).kept[name].to_pylist()


def test_scores_are_the_models_own(model):
    """Against the model's logits over the whole text at once."""
    scorer = load_scorer(str(model), None, "fp32", None)
    ids = [scorer.tokenizer.eos_id, *scorer.tokenizer.encode(TEXT, special=False)]
    assert scorer.tokenizer.bos_id is None
    from stepwell.models.transformer import ForwardOptions

    tokens = torch.tensor([ids[:-1]])
    with torch.no_grad():
        outputs = scorer.engine.decoder(
            tokens, torch.arange(len(ids) - 1)[None],
            torch.tensor([0, len(ids) - 1], dtype=torch.int32), torch.tensor([ids[1:]]), None,
            ForwardOptions(dtype=torch.float32, needs=frozenset({"logprobs"})),
        )  # fmt: skip
    nats = -float(outputs.logprobs_BT.double().sum())
    step = Perplexity(model=str(model))
    (bits,) = column(step, TEXT)
    (perplexity,) = column(step, TEXT, name="perplexity")
    assert bits == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)
    assert perplexity == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-5)


def test_no_other_document_changes_a_score(model):
    step = Perplexity(model=str(model))
    whole = [column(step, *TEXTS, name=name) for name in ("perplexity", "bits_per_byte")]
    alone = [
        [column(step, t, name=name)[0] for t in TEXTS] for name in ("perplexity", "bits_per_byte")
    ]
    assert whole == alone
    assert whole[0][2] is None
    assert column(step, *TEXTS[::-1]) == whole[1][::-1]
    assert step(batch()).kept.num_rows == 0


def test_long_texts_are_read_in_windows(model):
    short = Perplexity(model=str(model), seq_len=32)
    (windows,) = column(short, TEXT * 9)
    (context,) = column(Perplexity(model=str(model), seq_len=64), TEXT * 9)
    assert windows != context
    assert windows == pytest.approx(context, rel=0.2)


def test_every_limit_has_its_reason(model):
    plain = Perplexity(model=str(model))
    (bits,), (ppl,) = column(plain, TEXT), column(plain, TEXT, name="perplexity")
    for knob, value, reason in (
        ("min_perplexity", ppl + 1, "perplexity_too_low"),
        ("max_perplexity", ppl - 1, "perplexity_too_high"),
        ("min_bits_per_byte", bits + 0.1, "bits_per_byte_too_low"),
        ("max_bits_per_byte", bits - 0.1, "bits_per_byte_too_high"),
    ):
        step = Perplexity.model_validate({"model": str(model), knob: value})
        outcome = step(batch(TEXT, ""))
        assert outcome.removed["reason"].to_pylist() == [reason]
        assert outcome.kept["id"].to_pylist() == ["1"]
    fits = Perplexity(model=str(model), min_perplexity=ppl - 1, max_perplexity=ppl + 1)
    assert fits(batch(TEXT)).kept.num_rows == 1


def test_the_other_knobs(model):
    plain = column(Perplexity(model=str(model)), TEXT)
    assert column(Perplexity(model=str(model), dtype="bf16"), TEXT) != plain
    first = column(Perplexity(model=str(model), max_chars=20), TEXT)
    assert first == column(Perplexity(model=str(model)), TEXT[:20])
    same = Perplexity(model=str(model), tokenizer=str(model))
    assert column(same, TEXT) == plain


def test_what_it_has_learnt_scores_better_and_runs_are_read(model, tmp_path):
    """A checkpoint of a run, trained for some steps on one text."""
    tokenizer = Tokenizer.load(model)
    with StoreWriter(tmp_path / "store", tokenizer.fingerprint, tokenizer.vocab_size) as writer:
        for _ in range(50):
            writer.add([*tokenizer.encode(TEXT, special=False), tokenizer.eos_id])
    folder = tmp_path / "run"
    run = Run.parse(
        {
            "dir": str(folder),
            "model": config(vocab_size=tokenizer.vocab_size).model_dump(exclude_none=True),
            "precision": {"compute": "fp32"},
            "optim": {"lr": 3e-3},
            "train": {"steps": 30, "global_batch_rows": 4, "micro_batch_rows": 4},
            "data": {
                "seq_len": 40,
                "tokenizer": str(model),
                "sources": [{"path": str(tmp_path / "store")}],
            },
        }
    )
    pretrain(run)
    for place in (folder, folder / "checkpoints" / "step-00000030"):
        known, unknown = column(Perplexity(model=str(place)), TEXT, TEXT[::-1])
        assert known < 0.8 * unknown


def test_a_model_that_is_written_anew_is_read_anew(model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    before = column(Perplexity(model=str(folder)), TEXT)
    tokenizer = Tokenizer.load(model)
    cfg = config(vocab_size=tokenizer.vocab_size)
    shutil.rmtree(folder)
    save_hf(folder, cfg, random_decoder(cfg, seed=1).state_dict().items(), torch.float32,
            tokenizer=model)  # fmt: skip
    assert column(Perplexity(model=str(folder)), TEXT) != before


def test_what_does_not_fit_is_refused(model, tmp_path):
    with pytest.raises(CheckpointError, match="is no model"):
        column(Perplexity(model=str(tmp_path / "none")), TEXT)
    longest = load_scorer(str(model), None, "fp32", None).engine.run.model.max_seq_len
    with pytest.raises(ConfigError, match=f"{longest}, which is the nearest legal"):
        column(Perplexity(model=str(model), seq_len=longest + 1), TEXT)
    assert column(Perplexity(model=str(model), seq_len=longest), TEXT)
    Tokenizer.train([TEXT * 9 + "other words entirely"], 400).save(tmp_path / "other")
    with pytest.raises((CheckpointError, ConfigError)):
        column(Perplexity(model=str(model), tokenizer=str(tmp_path / "other")), TEXT)
    with pytest.raises(ValidationError, match="at most 2"):
        Perplexity(model="m", min_perplexity=3.0, max_perplexity=2.0)
