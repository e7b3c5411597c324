import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.cli import COMMANDS, GROUPS, Command, help_text, main
from stepwell.commands.run_arguments import Arguments, find_recipe, load_run, parse
from stepwell.commands.training import clear_folder
from stepwell.config import Run
from stepwell.schema import dotted_keys
from stepwell.types import ConfigError


def stepwell(*arguments: str, cwd: Path | None = None, **environ: str):
    return subprocess.run(
        [sys.executable, "-m", "stepwell.cli", *arguments],
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


# Help and unknown commands


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom stepwell.cli import main\nmain(['--help'])\n"
        "heavy = {'torch', 'pydantic', 'tyro', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out == help_text() + "\n"
    for group, commands in GROUPS.items():
        assert group in out
        for command in commands:
            assert f"  {command.name} " in out
            assert command.summary in out


def test_version(capsys):
    from stepwell import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stepwell {__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["pretrian"]) == 2
    assert "unknown command 'pretrian' (did you mean 'pretrain'?)" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name, capsys):
    try:
        code = main([name, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert f"stepwell {name}" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["pretrain", "sft", "grpo"])
def test_help_of_a_method_lists_its_keys(method, capsys):
    assert main([method, "--help"]) == 0
    out = capsys.readouterr().out
    for key, _ in dotted_keys(type(load_run(method, Arguments()).method), "method."):
        assert f"--{key} " in out
    assert "--optim.schedule.decay_shape " in out
    assert ("--method.group_size" in out) == (method == "grpo")
    for option in ("--nproc", "--resume", "--fresh", "--json"):
        assert option in out


# Arguments of the training commands


def test_arguments_are_split():
    argv = "a.toml --optim.lr=3e-4 --train.seed 7 --layout.dp-shard -1 --layout.compile --json"
    assert parse([*argv.split(), "--nproc", "2", "--fresh"]) == Arguments(
        recipe="a.toml",
        overrides={
            "optim.lr": "3e-4",
            "train.seed": "7",
            "layout.dp_shard": "-1",
            "layout.compile": "true",
        },
        num_procs=2,
        start="fresh",
        as_json=True,
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("a.toml b.toml", "two recipes, 'a.toml' and 'b.toml'"),
        ("--optim.lr", "--optim.lr needs a value"),
        ("--optim.lr --json", "--optim.lr needs a value"),
        ("--nproc two", "--nproc 'two' must be a whole number"),
        ("--json=1", "--json takes no value"),
        ("--resume --fresh", "exclude each other"),
        ("--nprocs 2", "unknown option --nprocs (did you mean '--nproc'?)"),
        ("--optim.lrr 2", "unknown key 'optim.lrr' (did you mean 'optim.lr'?)"),
        ("--lr 2", "unknown key 'lr' (did you mean 'optim.lr'?)"),
        ("--method.group_size 4", "unknown key 'method.group_size'"),
        ("--method.kind sft", "belongs to `stepwell sft`"),
        ("nowhere.toml", "no recipe 'nowhere.toml': neither a file nor one that ships"),
        ("quickstart-pretrian", "did you mean 'quickstart-pretrain'?"),
    ],
)
def test_a_wrong_command_line(argv, message):
    with pytest.raises(ConfigError) as error:
        load_run("pretrain", parse(argv.split()))
    assert message in str(error.value)


def test_a_recipe_is_a_file_or_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("quickstart-pretrain").name == "quickstart-pretrain.toml"
    Path("quickstart-pretrain").write_text("")
    assert find_recipe("quickstart-pretrain") == Path("quickstart-pretrain")


@pytest.mark.parametrize("text", ["", "[method]\nepochs = 2.0\n"])
def test_a_recipe_without_a_method_is_of_the_command(tmp_path, text):
    recipe = tmp_path / "a.toml"
    recipe.write_text("name = 'x'\n" + text)
    assert load_run("sft", Arguments(recipe=str(recipe))).method.kind == "sft"
    words = [str(recipe), "--method.epochs", "3", "--method.max_rows", "7"]
    run = load_run("sft", parse(words))
    assert (run.name, run.method.kind) == ("x", "sft")
    assert run.method == Run.parse({"method": {"kind": "sft", "epochs": 3, "max_rows": 7}}).method
    with pytest.raises(ConfigError, match=r"^the command line .*\n  method.max_rows = 0"):
        load_run("sft", parse([*words[:3], "--method.max_rows", "0"]))
    if not text:
        assert load_run("pretrain", Arguments(recipe=str(recipe))).method.kind == "pretrain"


def test_help_offers_what_can_be(capsys):
    assert main(["online-dpo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "kto" not in shown
    assert "desirable" not in shown
    assert main(["dpo", "--help"]) == 0
    assert "|kto|" in capsys.readouterr().out


def test_a_recipe_of_another_method_is_refused(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text("[method]\nkind = 'sft'\n")
    with pytest.raises(ConfigError, match="belongs to `stepwell sft`; `stepwell grpo` needs"):
        load_run("grpo", Arguments(recipe=str(recipe)))


def test_fresh_removes_only_what_a_run_wrote(tmp_path):
    folder = tmp_path / "run"
    clear_folder(folder)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name in ("run.toml", "metrics.jsonl", "notes.txt"):
        (folder / name).write_text("x")
    clear_folder(folder)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="has no run.toml"):
        clear_folder(folder)
    assert (folder / "notes.txt").exists()


# How a command ends


def test_an_error_of_the_user_has_no_traceback(tmp_path):
    done = stepwell("pretrain", "--train.steps", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        "stepwell: the command line is not valid:\n  train.steps = 0: must be above 0"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    done = stepwell("pretrain", "--resume", "--dir", str(tmp_path / "run"))
    assert done.returncode == 4
    assert "holds no checkpoint to go on from" in done.stderr


def test_more_processes_than_rows_are_refused_before_any_starts():
    done = stepwell("pretrain", "--nproc", "64", "--train.global_batch_rows", "32")
    assert done.returncode == 2
    assert "the nearest legal value is --nproc 32" in done.stderr


ENDINGS = {
    "fault": Command("fault", "", "tests.test_cli:fault"),
    "stopped": Command("stopped", "", "tests.test_cli:stopped"),
    "full": Command("full", "", "tests.test_cli:full"),
    "refused": Command("refused", "", "tests.test_cli:refused"),
}


def fault(_arguments):
    raise KeyError("w")


def stopped(_arguments):
    os.kill(os.getpid(), signal.SIGINT)


def full(_arguments):
    with open("/dev/full", "w") as file:
        file.write("x")


def refused(arguments):
    os.mkdir(arguments[0])


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setitem(COMMANDS, "fault", ENDINGS["fault"])
    with pytest.raises(KeyError):
        main(["fault"])


def test_ctrl_c_exits_130(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "stopped", ENDINGS["stopped"])
    assert main(["stopped"]) == 130
    assert capsys.readouterr().err == "stepwell: interrupted\n"


@pytest.mark.parametrize(
    ("words", "where"),
    [(["--out", "a/b"], "a/b"), (["--dir=c"], "c"), ([], f"the disk of {os.getcwd()}")],
)
def test_a_full_disk_is_named(monkeypatch, capsys, words, where):
    monkeypatch.setitem(COMMANDS, "full", ENDINGS["full"])
    assert main(["full", *words]) == 1
    message = f"stepwell: {where}: No space left on device; free some space\n"
    assert capsys.readouterr().err == message


def test_a_full_standard_output_is_named():
    command = f"{sys.executable} -m stepwell.cli --help > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    message = "stepwell: standard output: No space left on device; free some space\n"
    assert done.stderr == message


def test_a_path_that_the_system_refuses_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(COMMANDS, "refused", ENDINGS["refused"])
    (tmp_path / "file").write_text("")
    long = str(tmp_path / ("x" * 300))
    for path, reason in {
        str(tmp_path / "file"): "File exists",
        str(tmp_path / "file" / "below"): "Not a directory",
        long: "File name too long",
        "/proc/none": "",
    }.items():
        if path == "/proc/none":  # a path that is merely missing is no refusal
            with pytest.raises(FileNotFoundError):
                main(["refused", path])
            continue
        assert main(["refused", path]) == 1
        assert capsys.readouterr().err == f"stepwell: {path}: {reason}\n"


@pytest.mark.parametrize("out", ["file", "file/below", "x" * 300])
@pytest.mark.parametrize(
    "words",
    ["curate docs.jsonl --filters none", "tokenizer train docs.jsonl --vocab-size 300"],
)
def test_a_bad_place_to_write_is_one_line(tmp_path, monkeypatch, capsys, words, out):
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text('{"text": "some words of text"}\n')
    Path("file").write_text("mine")
    assert main([*words.split(), "--out", out]) in (1, 3)
    message = capsys.readouterr().err
    assert message.startswith("stepwell: ")
    assert message.count("\n") == 1
    assert out in message
    assert sorted(os.listdir()) == ["docs.jsonl", "file"]
    assert Path("file").read_text() == "mine"


def test_a_reader_that_leaves_is_no_crash():
    command = f"{sys.executable} -m stepwell.cli pretrain --help | head -1; exit ${{PIPESTATUS[0]}}"
    for _ in range(3):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.stderr == ""
        assert done.returncode in (0, 141)


def test_a_command_runs_and_reports_json(tmp_path, small_run, capsys):
    done = stepwell("pretrain", str(small_run), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == {"name": "small", "dir": str(tmp_path / "run"), "steps_done": 2, "step": 2}
    assert main(["pretrain", str(small_run)]) == 0
    assert "was finished before" in capsys.readouterr().out
    assert main(["pretrain", str(small_run), "--fresh", "--train.steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps_done"] == 1


@pytest.fixture
def small_run(tmp_path):
    from stepwell.data.store import StoreWriter

    writer = StoreWriter(tmp_path / "store", "0" * 64, 64)
    for start in range(40):
        writer.add([(start + i) % 63 for i in range(30)] + [63])
    writer.close()
    path = tmp_path / "small.toml"
    path.write_text(
        f"""
name = "small"
dir = "{tmp_path}/run"
[model]
vocab_size = 64
num_layers = 1
d_model = 32
num_heads = 2
num_kv_heads = 1
head_dim = 16
d_ff = 32
[data]
sources = [{{path = "{tmp_path}/store"}}]
seq_len = 64
[train]
steps = 2
global_batch_rows = 4
micro_batch_rows = 2
"""
    )
    return path


@pytest.mark.parametrize(("given", "wanted"), [(None, "1000"), ("7", "7")])
def test_openmp_threads_do_not_spin_unless_told_to(monkeypatch, given, wanted):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    assert main(["--version"]) == 0
    assert os.environ["GOMP_SPINCOUNT"] == wanted
