"""What a name on a command line, or in an ini file, stands for."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

import msgspec

from ecotone.errors import ConfigError
from ecotone.protocol.connector import ECConnectorFactory
from ecotone.protocol.outputs import ECConnectorWorkerMetadata
from ecotone.testing.kit.capabilities import Subject
from ecotone.testing.kit.connector import DEFAULT_EXAMPLES, check_connector
from ecotone.testing.kit.metadata import check_worker_metadata
from ecotone.testing.kit.own import BUILT_IN
from ecotone.testing.kit.report import Report
from ecotone.testing.kit.rules import CONNECTOR_RULES, METADATA_RULES, Rule
from ecotone.testing.kit.uses import MetadataUse

Target = Subject | type[ECConnectorWorkerMetadata] | MetadataUse


def find_target(name: str, options: dict[str, Any] | None = None) -> Target:
    """What ``name`` stands for: ``MODULE:NAME`` of an ``ECConnectorFactory`` class, of a ``Subject``, of a worker
    metadata type or of a ``MetadataUse``; or a built-in connector.

    Args:
        options: the connector's, instead of those that its subject has.

    Raises:
        ConfigError: it stands for nothing that the kit can check.
    """
    found = BUILT_IN.get(name) or _load(name)
    if inspect.isclass(found) and issubclass(found, ECConnectorFactory) and not inspect.isabstract(found):
        found = Subject(factory=found(), name=found.__name__)
    if isinstance(found, ECConnectorFactory):
        found = Subject(factory=found, name=type(found).__name__)
    if isinstance(found, Subject):
        return found if options is None else msgspec.structs.replace(found, options=options)
    if isinstance(found, MetadataUse) or (inspect.isclass(found) and issubclass(found, ECConnectorWorkerMetadata)):
        return found
    raise ConfigError(f"{name!r} is no ECConnectorFactory, no Subject and no worker metadata type")


def check_target(target: Target, *, seed: int = 0, examples: int = DEFAULT_EXAMPLES, only: str = "") -> Report:
    """Check it with what is for its kind."""
    if isinstance(target, Subject):
        return check_connector(target, seed=seed, examples=examples, only=only)
    return check_worker_metadata(target, seed=seed)


def rules_for(target: Target) -> tuple[Rule, ...]:
    """The rules that its report will have."""
    return (*CONNECTOR_RULES, *METADATA_RULES) if isinstance(target, Subject) else METADATA_RULES


def _load(name: str) -> object:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{name!r} is neither MODULE:NAME nor one of {', '.join(BUILT_IN)}")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{name!r}: module {module_name!r} cannot be imported: {error}") from error
    # A rim: what somebody's module raises on its way in is theirs to read, without our frames.
    except Exception as error:
        raise ConfigError(f"{name!r}: module {module_name!r} raised {_said(error)}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{name!r}: module {module_name!r} has no {attribute!r}")
    found: object = getattr(module, attribute)
    return found


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # it says where
    last = extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"
