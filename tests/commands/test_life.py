"""The commands one after the other, as a user would: documents to an exported model."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stepwell.cli import main

MODEL = {
    "vocab_size": 512,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "d_ff": 64,
}
PACKED = [
    *("--data.seq_len", "64", "--train.micro_batch_rows", "2"),
    *("--data.tokenizer", "tokenizer", "--json"),
]
SMALL = ["--train.global_batch_rows", "4", *PACKED]


def write_rows(path: str, rows: list[dict]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A folder in which curate, tokenizer, pretrain, sft and grpo have run, and their results."""
    folder = tmp_path_factory.mktemp("life")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    texts = [f"The sum of {a} and {b} is {a + b}, for {a} + {b} = {a + b}." for a, b in sums]
    write_rows("docs.jsonl", [{"text": t} for t in [*texts, texts[0], ""]] + [{"txet": "x"}])
    write_rows("chat.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums])
    write_rows("problems.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums])
    write_rows("choices.jsonl", [{"context": "1+1=", "choices": ["2", "7"], "answer": "2"}])
    Path("docs.bin").write_text("x")
    Path("rows").mkdir()
    write_rows("rows/docs.jsonl", [{"text": "x"}])
    dims = [word for key, value in MODEL.items() for word in (f"--model.{key}", str(value))]
    commands = [
        "curate docs.jsonl --filters none --out clean --json",
        "tokenizer train clean --vocab-size 512 --out tokenizer --json",
        "tokenizer encode clean --tokenizer tokenizer --out store --json",
    ]
    codes = [main(command.split()) for command in commands]
    sources = ["--data.sources", '[{path = "store"}]']
    codes.append(main(["pretrain", *dims, *sources, *SMALL, "--train.steps", "3", "--dir", "base"]))
    chat = ["--data.path", "chat.jsonl", "--model.init", "base", "--train.steps", "2"]
    codes.append(main(["sft", *chat, *SMALL, "--dir", "tuned"]))
    problems = ["--data.path", "problems.jsonl", "--model.init", "tuned", "--train.steps", "2"]
    group = ["--method.prompts_per_step", "2", "--method.group_size", "2"]
    short = ["--method.max_new_tokens", "4"]
    codes.append(main(["grpo", *problems, *group, *short, *PACKED, "--dir", "rewarded"]))
    assert codes == [0] * 6
    yield folder
    patch.undo()


def run(capsys, *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_curation_counts_every_drop(life):
    report = json.loads((life / "clean" / "curation.json").read_text())
    dropped = [step["dropped"] for step in report["tally"]["steps"].values()]
    assert dropped == [{"empty": 1, "missing_column": 1}, {"exact_duplicate": 1}]
    assert report["kept"]["docs"][0] == 64


def test_every_stage_left_a_run(life):
    for name, steps in {"base": 3, "tuned": 2, "rewarded": 2}.items():
        lines = (life / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == steps
        assert list((life / name / "checkpoints").iterdir())
    assert len((life / "rewarded" / "samples.jsonl").read_text().splitlines()) > 0


def test_a_stage_starts_from_the_one_before(life):
    recipe = (life / "rewarded" / "run.toml").read_text()
    assert "tuned/checkpoints/step-00000002" in recipe
    assert "d_model = 32" in recipe


def test_a_recipe_that_contradicts_the_weights_is_refused(life, capsys):
    words = ["--model.init", "base", "--model.d_model", "64", "--data.path", "chat.jsonl"]
    assert main(["sft", *words, *SMALL, "--dir", "other"]) == 2
    assert "model.d_model=64 contradicts" in capsys.readouterr().err


def test_generate_repeats_itself_whatever_the_batch(life, capsys):
    words = ["generate", "rewarded", "--prompts-file", "problems.jsonl", "--samples", "2"]
    words += ["--max-new-tokens", "4", "--seed", "3", "--json"]
    many = run(capsys, *words, "--batch-size", "16").splitlines()
    few = run(capsys, *words, "--batch-size", "8").splitlines()
    assert len(many) == 128
    assert [json.loads(line)["token_ids"] for line in many] == [
        json.loads(line)["token_ids"] for line in few
    ]
    other = run(capsys, *words, "--seed", "4").splitlines()
    assert other != many


def test_eval_scores_texts_choices_and_answers(life, capsys):
    words = ["eval", "rewarded", "--text", "docs.jsonl", "--choices", "choices.jsonl"]
    words += ["--prompts", "problems.jsonl", "--max-new-tokens", "4", "--limit", "8", "--json"]
    found = json.loads(run(capsys, *words))
    assert 0 < found["docs.jsonl"]["bits_per_byte"] < 9
    assert found["docs.jsonl"]["documents"] == 8
    assert found["choices.jsonl"]["items"] == 1
    assert 0 <= found["problems.jsonl"]["accuracy"] <= 1
    assert found["problems.jsonl"]["items"] == 8


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("eval rewarded", 2, "nothing to evaluate"),
        ("eval rewarded --prompts problems.jsonl --samples 2", 2, "set --temperature above 0"),
        ("eval rewarded --prompts problems.jsonl --samples 0", 2, "--samples 0 must be at least 1"),
        ("eval rewarded --prompts problems.jsonl --limit -1", 2, "--limit -1 must be at least 1"),
        ("eval rewarded --text rows --limit 0", 2, "--limit 0 must be at least 1"),
        ("score rewarded problems.jsonl --limit -1", 2, "--limit -1 must be at least 1"),
        ("problems chain-sum --out y --seed -1", 2, "--seed -1 must be at least 0"),
        ("generate rewarded", 3, "there is no prompt"),
        ("generate nowhere --prompt x", 4, "'nowhere' holds no model"),
        ("generate rewarded --prompt x --temperature -1", 2, "temperature=-1.0"),
        ("export rewarded --out clean", 4, "clean is there already; choose another folder, or"),
        ("export rewarded --out clean", 4, "with --overwrite"),
        ("curate --out y", 2, "no input"),
        ("curate nowhere --out y", 3, "there is nothing to read at 'nowhere'"),
        ("generate rewarded --prompts-file clean", 3, "clean is a folder; name the file in it"),
        ("curate stdlib-cod --out y", 3, "'stdlib-cod' (did you mean 'stdlib-code'?)"),
        (
            "curate docs.bin --out y",
            3,
            "docs.bin is of no known kind: set kind, or give a file in .txt",
        ),
        ("curate rows --out y", 3, "dropped        1  1. gopher-quality: gopher_too_few_words"),
        ("tokenizer trian x", 2, "did you mean 'train'?"),
        ("tokenizer encode clean --tokenizer tokenizer --out store", 3, "store exists already"),
        ("tokenizer train clean --vocab-size 512 --out tokenizer", 3, "give --overwrite"),
        ("tokenizer train clean --vocab-size 999999999999 --out y", 2, "the largest, 1048576"),
        ("report clean", 3, "clean"),
    ],
)
def test_wrong_input_is_named(life, capsys, words, code, message):
    assert main(words.split()) == code
    assert message in capsys.readouterr().err


def test_export_gives_the_same_logits_in_transformers(life, capsys):
    import torch
    import transformers

    from stepwell.commands.inputs import open_model
    from stepwell.models.transformer import Decoder

    run(capsys, "export", "rewarded", "--out", "exported", "--dtype", "fp32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(life / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(life / "exported")
    model = open_model("rewarded")
    ours = Decoder(model.cfg)
    ours.load_state_dict(dict(model.weights))
    ids = torch.tensor([tokenizer("The sum of 3 and 4 is").input_ids])
    state = ours.state_dict()
    assert torch.equal(theirs.state_dict()["model.embed_tokens.weight"], state["embed.weight"])
    with torch.no_grad():
        expected = theirs(ids).logits.log_softmax(-1)
    greedy = int(expected[0, -1].argmax())
    words = ["--prompt", "The sum of 3 and 4 is", "--max-new-tokens", "1", "--temperature", "0"]
    line = run(capsys, "generate", "exported", *words, "--dtype", "fp32", "--json")
    assert json.loads(line)["token_ids"] == [greedy]
    assert json.loads(line)["logprobs"] == pytest.approx([float(expected[0, -1, greedy])], abs=1e-5)


def test_report_writes_a_page(life, capsys):
    page = Path(run(capsys, "report", "rewarded").strip())
    assert page == Path("rewarded/report.html")
    assert "<html" in page.read_text("utf-8")


def test_a_smaller_vocabulary_than_asked_for_is_said(life, capsys):
    words = ["tokenizer", "train", "clean", "--vocab-size", "9000", "--out", "big"]
    out = run(capsys, *words)
    assert "of the 9,000 asked for: the text gives no more merges" in out
    before = (life / "big" / "tokenizer.json").read_text()
    assert run(capsys, *words, "--overwrite") == out
    assert (life / "big" / "tokenizer.json").read_text() == before


def test_curation_that_keeps_nothing_says_why_and_writes_nothing(life, capsys):
    write_rows("wrong.jsonl", [{"txet": "a"}, {"txet": "b"}, {"text": None}, {"body": 1}])
    assert main(["curate", "wrong.jsonl", "--out", "empty"]) == 3
    message = capsys.readouterr().err
    assert "no document is left of 4 records, so empty was not written" in message
    assert "dropped        3  read: missing_column, e.g. wrong.jsonl@0: no 'text' (did you" in (
        message
    )
    assert "read: wrong_type, e.g. wrong.jsonl@28: the text is nothing (null)" in message
    assert not list(life.glob("*empty*"))


def test_curation_reads_single_files_and_folders_of_text_and_code(life, capsys):
    Path("notes").mkdir()
    for name in ("notes/a.md", "notes/b.txt", "notes/c.py", "mk.py", "one.rst"):
        Path(name).write_text(f"# what {name} holds\n")
    Path("notes/latin.py").write_bytes("# coding: latin-1\n# Straße\n".encode("latin-1"))
    inputs = ["notes", "mk.py", "one.rst"]
    out = run(capsys, "curate", *inputs, "--filters", "none", "--out", "read")
    assert out.startswith("read 6 records\nkept 6 documents, ")
    kept = pq.read_table(life / "read" / "documents").to_pylist()
    assert [k["id"] for k in kept] == ["a.md", "b.txt", "c.py", "latin.py", "mk.py", "one.rst"]
    assert "Straße" in kept[3]["text"]
    out = run(capsys, *["curate", "mk.py", "--filters", "none", "--no-dedup", "--out", "one"])
    assert out.startswith("read 1 record\nkept 1 document, 0.0 kB: one\n")


@pytest.mark.parametrize("words", ["curate", "tokenizer train", "tokenizer encode", "generate"])
def test_help_shows_no_empty_defaults(capsys, words):
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for ugly in ("[[", "(default: )", "(default: None)", "{None}"):
        assert ugly not in out
    assert "INPUT ..." in out or words == "generate"


def test_generate_prints_answers_alone_or_after_their_prompts(life, capsys):
    words = ["generate", "rewarded", "--prompt", "The sum of", "--max-new-tokens", "4"]
    words += ["--temperature", "0"]
    answer = json.loads(run(capsys, *words, "--json"))["text"]
    assert run(capsys, *words) == f"{answer}\n"
    assert run(capsys, *words, "--echo") == f"The sum of{answer}\n"
    assert run(capsys, *words, "--samples", "2") == f"{answer}\n\n{answer}\n"


def test_a_terminal_shows_the_prompt_dimmed(life):
    from stepwell.commands.generate import answer_text
    from stepwell.tokenizer import Tokenizer
    from stepwell.types import Completion

    tokenizer = Tokenizer.load("tokenizer")
    completion = Completion(0, tuple(tokenizer.encode("The sum")), (1,), (0.0,), " of", "stop")
    assert answer_text(completion, tokenizer, False, "dim") == "\x1b[2mThe sum\x1b[0m of"


def test_a_full_context_is_said(life, capsys):
    """base sees 2048 tokens, most of which the prompt takes."""
    prompt = "The sum of 1 and 1 is 2. " * 400
    from stepwell.tokenizer import Tokenizer

    tokenizer = Tokenizer.load("tokenizer")
    ids = tokenizer.encode(prompt)[:2040]
    prompt = tokenizer.decode(ids)
    room = 2048 - len(tokenizer.encode(prompt))
    words = ["--prompt", prompt, "--max-new-tokens", "99", "--temperature", "0"]
    assert 0 < room < 99
    assert main(["generate", "base", *words]) == 0
    error = capsys.readouterr().err
    assert "1 answer ended before --max-new-tokens 99: the model's context of 2048 tokens" in error


def test_another_tokenizer_than_the_models_is_refused(life, capsys):
    run(capsys, *["tokenizer", "train", "clean", "--vocab-size", "270", "--out", "small"])
    for words in ("generate base --prompt x", "export base --out y"):
        assert main([*words.split(), "--tokenizer", "small"]) == 2
        assert "does not fit the model base" in capsys.readouterr().err


def test_a_quickstarts_folder_stands_for_its_last_run(life, capsys):
    from stepwell.commands.inputs import last_run, open_model

    folder = Path("quick")
    folder.mkdir()
    (folder / "quickstart.json").write_text("{}")
    assert last_run(folder) is None
    assert main(["generate", "quick", "--prompt", "x"]) == 4
    assert "'quick' holds no model" in capsys.readouterr().err
    run(capsys, "export", "base", "--out", "quick/model")
    assert last_run(folder) == folder / "model"
    (folder / "pretrain").symlink_to(life / "base")
    (folder / "grpo").symlink_to(life / "rewarded")
    assert open_model("quick").path == folder / "grpo"
    words = ["--prompt", "The sum", "--temperature", "0", "--max-new-tokens", "4", "--json"]
    assert run(capsys, "generate", "quick", *words) == run(capsys, "generate", "rewarded", *words)
    assert run(capsys, "report", "quick").strip() == "quick/grpo/report.html"
    (folder / "report.html").write_text("<html>")
    assert run(capsys, "report", "quick").strip() == "quick/report.html"
    assert (folder / "report.html").read_text() == "<html>"


@pytest.mark.parametrize(
    "words",
    [
        "curate LONG --out y",
        "tokenizer train LONG --out y",
        "tokenizer encode clean --tokenizer LONG --out y",
        "generate LONG --prompt x",
        "generate rewarded --prompts-file LONG",
        "export LONG --out y",
        "export rewarded --out LONG",
        "report LONG",
        "report rewarded --out LONG",
        "report rewarded --out docs.jsonl/page.html",
        "export rewarded --out docs.jsonl/model",
    ],
)
def test_a_path_that_cannot_be_is_named_in_one_line(life, capsys, words):
    before = sorted(p.name for p in life.iterdir())
    long = "x" * 300
    assert main(words.replace("LONG", long).split()) in (1, 3, 4)
    message = capsys.readouterr().err
    assert message.startswith("stepwell: ")
    assert message.count("\n") == 1
    assert (long if "LONG" in words else "docs.jsonl") in message
    assert sorted(p.name for p in life.iterdir()) == before
