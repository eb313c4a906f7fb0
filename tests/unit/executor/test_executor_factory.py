"""Which executor a configuration means, and what is refused before anything is started."""

import importlib.util

import pytest

from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import ConfigError, LostReportsError
from ecotone.executor import factory
from ecotone.executor.multiproc import MultiprocExecutor
from ecotone.executor.uniproc import UniprocExecutor


class BuiltError(Exception):
    """Instead of building an executor."""


@pytest.fixture
def built(monkeypatch):
    """The executor class that would be built."""
    kinds = []

    def instead(self, *args, **kwargs):
        kinds.append(type(self))
        raise BuiltError

    for kind in (UniprocExecutor, MultiprocExecutor):
        monkeypatch.setattr(kind, "__init__", instead)

    def choose(**options):
        with pytest.raises(BuiltError):
            factory.create_executor(EngineConfig(model="tiny", **options), None, "engine")
        return kinds.pop()

    return choose


def test_auto_takes_what_the_number_of_ranks_needs(built):
    assert built() is UniprocExecutor
    assert built(tensor_parallel_size=2) is MultiprocExecutor
    assert built(pipeline_parallel_size=2) is MultiprocExecutor


def test_a_name_is_taken_as_it_is(built):
    assert built(executor="uniproc", tensor_parallel_size=2) is UniprocExecutor
    assert built(executor="multiproc") is MultiprocExecutor


def test_one_process_has_one_rank():
    with pytest.raises(ConfigError, match="executor='uniproc' has one rank, not 2"):
        factory.create_executor(
            EngineConfig(model="tiny", executor="uniproc", tensor_parallel_size=2), None, "engine"
        )


@pytest.mark.parametrize("name", ["ray", "ray_single_reply"])
def test_without_ray_the_error_says_what_to_install(monkeypatch, name):
    real = importlib.util.find_spec
    monkeypatch.setattr(factory, "find_spec", lambda module: None if module == "ray" else real(module))
    with pytest.raises(ConfigError, match=rf"executor='{name}' needs Ray.*pip install 'ecotone\[ray\]'"):
        factory.create_executor(EngineConfig(model="tiny", executor=name), None, "engine")


def test_a_single_reply_would_lose_reports_and_is_refused_before_ray_starts():
    ray = pytest.importorskip("ecotone.executor.ray_cluster", exc_type=ImportError).ray
    running = ray.is_initialized()
    config = EngineConfig(model="tiny", executor="ray_single_reply", tensor_parallel_size=2, ec=ECConfig())
    with pytest.raises(NotImplementedError, match=r"multiproc.*RayExecutorV2") as refused:
        factory.create_executor(config, None, "engine")
    assert isinstance(refused.value, LostReportsError)
    assert ray.is_initialized() is running
