"""Reward models in Transformers: equal scores, whatever the padding; what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import load_hf, read_hf_config
from stepwell.models.hf_reward import padding_token, read_hf_notes, save_hf_reward
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.reward_model.model import open_scorer
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.types import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")

ALONE = Mesh(1, 0, 0, torch.device("cpu"))
FAMILIES = {
    "llama": {},
    "qwen2": {"model.qkv_bias": True},
    "qwen3": {"model.qk_norm": True},
    "mistral": {"model.sliding_window": 8},
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["1+2=3 is the sum of them"] * 3, 320)


def engine_of(family="llama", /, **more):
    values = {
        "model.family": family,
        "model.vocab_size": 320,
        "model.num_layers": 2,
        "model.d_model": 32,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_dim": 16,
        "model.d_ff": 48,
        "model.init_std": 0.3,
        "model.head": "score",
        "method.kind": "reward",
        "precision.compute": "fp32",
        **FAMILIES[family],
        **more,
    }
    if values["model.head"] == "score":  # an objective with any number of labels
        values.setdefault("method.objective", "classification")
    return Engine(Run.parse({}, values))


def written(tokenizer, folder):
    tokenizer.save(folder / "tokenizer")
    return folder / "tokenizer"


def save(engine, folder, tokenizer, **more):
    save_hf_reward(
        folder,
        engine.run.model,
        engine.iter_state(),
        torch.float32,
        tokenizer_path=written(tokenizer, Path(folder).parent),
        **more,
    )
    return str(folder)


def documents(tokenizer):
    """Of different lengths; they end in eos, and one has eos within."""
    eos, generator = tokenizer.eos_id, torch.Generator().manual_seed(0)
    docs = [
        [*torch.randint(10, 300, (n,), generator=generator).tolist(), eos] for n in (3, 17, 1, 30)
    ]
    docs[1][5] = docs[1][9] = eos
    return docs


def hf_scores(model, docs, side, pad_id):
    longest = max(map(len, docs)) + 2
    ids, mask = [], []
    for doc in docs:
        pad = [pad_id] * (longest - len(doc))
        ids.append(pad + doc if side == "left" else doc + pad)
        seen, hidden = [1] * len(doc), [0] * len(pad)
        mask.append(hidden + seen if side == "left" else seen + hidden)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)
        ).logits  # (D, C)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), *((f, False) for f in FAMILIES)])
def test_transformers_gives_equal_scores_under_any_padding(tmp_path, tokenizer, family, tied):
    engine = engine_of(family, **{"model.tied": tied})
    folder = save(engine, tmp_path / "rm", tokenizer)
    docs = documents(tokenizer)
    scorer = open_scorer([folder], ALONE, 64, compute="fp32")
    ours = scorer.score(docs)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert type(model).__name__.endswith("ForSequenceClassification")
    assert model.config.num_labels == 1
    pad_id = transformers.AutoTokenizer.from_pretrained(folder).pad_token_id
    assert pad_id == model.config.pad_token_id not in tokenizer.stop_ids
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([doc])).logits[:, 0] for doc in docs])
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=1e-5)
    for side in ("left", "right"):
        padded = hf_scores(model, docs, side, pad_id)[:, 0]
        torch.testing.assert_close(ours, padded, atol=1e-5, rtol=1e-5)
    # Packed or alone, in any order.
    apart = torch.cat([scorer.score([doc]) for doc in docs])
    torch.testing.assert_close(ours, apart, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.flip(0), scorer.score(docs[::-1]), atol=1e-5, rtol=1e-5)
    assert ours.std() > 0.1


def test_what_transformers_saves_loads_with_equal_scores(tmp_path, tokenizer):
    """Also where its padding token is the one that ends texts: it then passes over that."""
    engine = engine_of(**{"model.num_labels": 3})
    folder = save(engine, tmp_path / "rm", tokenizer)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.eos_id
    model.save_pretrained(tmp_path / "theirs")
    docs = documents(tokenizer)
    theirs = hf_scores(model, docs, "right", tokenizer.eos_id)
    scorer = open_scorer([str(tmp_path / "theirs")], ALONE, 64, compute="fp32")
    (ours,) = scorer.class_chances(docs)
    torch.testing.assert_close(ours, theirs.softmax(-1), atol=1e-5, rtol=1e-5)
    (other,) = open_scorer([folder], ALONE, 64, compute="fp32").class_chances(docs)
    assert not torch.allclose(other, ours, atol=1e-3)
    with pytest.raises(ConfigError, match="scores 3 classes"):
        scorer.score(docs)


@pytest.mark.parametrize("num_labels", [1, 2])
def test_steps_are_scored_as_a_token_classifier_does(tmp_path, tokenizer, num_labels):
    engine = engine_of(**{"model.num_labels": num_labels, "method.objective": "process"})
    folder = save(engine, tmp_path / "prm", tokenizer, kind="token")
    docs, ends = documents(tokenizer)[1::2], [[4, 9, 17], [0, 30]]
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert not model.score.bias.any()
    ours = open_scorer([folder], ALONE, 64, compute="fp32").step_scores(docs, ends)
    for doc, places, found in zip(docs, ends, ours, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([doc])).logits[0, places]
        wanted = logits[:, 0].sigmoid() if num_labels == 1 else logits.softmax(-1)[:, 1]
        assert found == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_head_survives_and_a_bias_is_refused(tmp_path, tokenizer):
    engine = engine_of(**{"model.num_labels": 2})
    folder = tmp_path / "rm"
    save(engine, folder, tokenizer, kind="token", mean=0.25, sd=2.0)
    cfg = read_hf_config(folder)
    assert (cfg.head, cfg.num_labels) == ("score", 2)
    found, wanted = dict(load_hf(folder, parameter_shapes(cfg))), engine.full_state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    notes = read_hf_notes(folder)
    assert (notes.mean, notes.sd) == (0.25, 2.0)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.bias"][1] = 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"score.bias .* is not zero"):
        load_hf(folder, parameter_shapes(cfg))


def test_labels_as_transformers_counts_them(tmp_path, tokenizer):
    folder = tmp_path / "rm"
    save(engine_of(**{"model.num_labels": 3}), folder, tokenizer)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, wanted in ((("id2label"), 3), ("label2id", 2)):
        assert read_hf_config(folder).num_labels == wanted or key == "label2id"
        values.pop(key)
        path.write_text(json.dumps(values))
    assert read_hf_config(folder).num_labels == 2  # Transformers' own default
    values["num_labels"] = 3
    path.write_text(json.dumps(values))
    assert read_hf_config(folder).num_labels == 3
    values["architectures"] = ["LlamaForQuestionAnswering"]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="LlamaForSequenceClassification"):
        read_hf_config(folder)


def test_the_padding_token_never_ends_a_text(tokenizer):
    assert padding_token(tokenizer) == "<|pad|>"
    spec = tokenizer._spec
    shared = Tokenizer(spec, {"eos_token": "<|eos|>", "pad_token": "<|eos|>"})
    assert shared.pad_id == shared.eos_id
    assert padding_token(shared) == "<|pad|>"
    template = {"chat_template": "<|system|><|user|><|assistant|>"}
    ends = Tokenizer(spec.replace("<|pad|>", "<|other|>"), {"eos_token": "<|eos|>", **template})
    assert padding_token(ends) == "<|other|>"
    none = Tokenizer(spec.replace("<|pad|>", "</s>"), {"eos_token": "<|eos|>", **template})
    with pytest.raises(ConfigError, match="no other special token"):
        padding_token(none)


def test_only_reward_models_are_exported_as_such(tmp_path, tokenizer):
    engine = engine_of(**{"model.head": "lm", "method.kind": "sft"})
    with pytest.raises(ConfigError, match="no reward model"):
        save(engine, tmp_path / "rm", tokenizer)
