"""A plan names the packages that layers with states lack on a GPU, and imports none."""

import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.rules.state_packages import PACKAGES, install
from tests.helpers import configs
from tests.helpers.configs import REPOSITORY

CONFIG = REPOSITORY / "configs/tiny_qwen3_next.yaml"
ON_GPU = ("device=cuda", "model.dtype=bfloat16")


def problems(*overrides: str) -> list[str]:
    found = compile_plan(CONFIG, overrides).unsupported
    return [each for each in found if each.startswith("kernels.backend: auto")]


def test_state_problems_name_the_packages_and_the_command():
    conv, fla = problems(*ON_GPU)
    assert "causal_conv1d is not installed, expected causal-conv1d 1.7.0" in conv
    assert "fla is not installed, expected fla-core 0.6.0" in fla
    assert all(install("gated_delta_net") in each for each in (conv, fla))


@pytest.mark.parametrize("given", [(), ("device=cuda",)])
def test_state_problems_are_of_bfloat16_on_a_gpu(given: tuple[str, ...]):
    """torch serves a CPU, and float32."""
    assert problems(*given) == []


@pytest.mark.parametrize(
    ("version", "problem"),
    [("0.6.0", None), ("0.6.3", None), ("0.5.2", "fla-core 0.5.2, expected 0.6")],
)
def test_state_problems_look_at_versions(tmp_path, monkeypatch, version, problem):
    monkeypatch.syspath_prepend(str(tmp_path))
    configs.install(tmp_path, "causal-conv1d", "1.7.0", "causal_conv1d.py")
    configs.install(tmp_path, "fla-core", version, "fla.py")
    found = problems(*ON_GPU)
    assert [problem in each for each in found] == ([True] if problem else [])


def test_state_problems_of_a_folder_without_its_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fla.py").touch()
    assert "fla is installed without fla-core, expected that package of pip" in problems(*ON_GPU)[1]


def test_PACKAGES_are_those_of_the_extra():
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = {f"{p.name}=={p.version}" for each in PACKAGES.values() for p in each}
    assert named == {*project["optional-dependencies"]["hybrid"]}
