"""What the words of a training command mean."""

import pytest

from stepwell.commands.run_arguments import help_text, load_run, parse
from stepwell.types import ConfigError


@pytest.mark.parametrize(
    ("method", "argv", "message"),
    [
        ("pretrain", "--resum", "unknown option --resum (did you mean '--resume'?)"),
        ("pretrain", "--resum --json", "unknown option --resum (did you mean '--resume'?)"),
        ("pretrain", "--optim.lr 1 --optim.lr 2", "--optim.lr is given twice"),
        ("pretrain", "--data.seq-len=8 --data.seq_len=8", "--data.seq_len is given twice"),
        ("pretrain", "--nproc 1 --nproc 2", "--nproc is given twice"),
        ("pretrain", "--method.epochs 2", "'method.epochs' of pretrain: it belongs to sft"),
        ("sft", "--method.group_size 2", "'method.group_size' of sft: it belongs to grpo"),
        ("sft", "--method.epohs 2", "did you mean 'method.epochs'?"),
        ("pretrain", "--name", "--name needs a value"),
    ],
)
def test_a_wrong_command_line(method, argv, message):
    with pytest.raises(ConfigError) as error:
        load_run(method, parse(argv.split()))
    assert message in str(error.value)


def test_the_fault_is_the_recipes_or_the_command_lines(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text("[train]\nsteps = 5\n")
    words = [str(recipe), "--train.steps", "0"]
    with pytest.raises(
        ConfigError, match=r"(?s)^the command line \(over the recipe .*train\.steps"
    ):
        load_run("pretrain", parse(words))
    assert load_run("pretrain", parse([*words[:2], "7"])).train.steps == 7
    recipe.write_text("[train]\nsteps = 0\n")
    with pytest.raises(ConfigError, match=r"^the recipe .* is not valid"):
        load_run("pretrain", parse([str(recipe), "--optim.lr", "1"]))
    assert load_run("pretrain", parse([*words[:2], "7"])).train.steps == 7


@pytest.mark.parametrize("method", ["pretrain", "sft", "grpo"])
def test_help_lists_the_recipes_of_its_method(method):
    (line,) = (line for line in help_text(method).splitlines() if "quickstart-" in line)
    assert f"quickstart-{method}" in line
    assert all(f"quickstart-{m}" not in line for m in ("pretrain", "sft", "grpo") if m != method)
