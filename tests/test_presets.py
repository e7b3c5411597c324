"""Total parameters against the figures published with the checkpoints (hub safetensors totals)."""

import subprocess
import sys

import pytest

from stepwell.models.flops import count_parameters
from stepwell.presets import PRESETS, preset
from stepwell.types import ConfigError

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
}


@pytest.mark.parametrize("name", PRESETS)
def test_total_parameters_are_the_published_ones(name):
    assert count_parameters(preset(name)).total == PUBLISHED[name]


def test_non_embedding_parameters_of_qwen3_and_llama():
    """Qwen3's model cards give them: 0.44 B, 6.95 B, 31.2 B."""
    for name, published in (("qwen3-0.6b", 0.44), ("qwen3-8b", 6.95), ("qwen3-32b", 31.2)):
        counts = count_parameters(preset(name))
        bare = (counts.total - counts.embedding - counts.head) / 1e9
        assert abs(bare / published - 1) < 0.01


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        preset("smollm2-135")
    with pytest.raises(ConfigError, match="llama3-405b"):
        preset("gpt-5")
    assert preset("Qwen3-8B ") == PRESETS["qwen3-8b"]


def test_presets_import_no_torch():
    code = "import sys, stepwell.presets, stepwell.models.flops; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
