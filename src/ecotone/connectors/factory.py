"""How an engine gets its connector: by a name, or by a class of the operator's own."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

from ecotone.config import ECConfig
from ecotone.connectors.config import EcotoneOptions, check_load_mode, parse_options
from ecotone.connectors.copy.cuda import CudaCopyEngine
from ecotone.connectors.copy.engine import CopyEngine
from ecotone.connectors.copy.thread import ThreadCopyEngine
from ecotone.connectors.participants import check_participants
from ecotone.connectors.rows import region_bytes
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.connectors.worker import EcotoneWorkerConnector
from ecotone.errors import ConfigError
from ecotone.node.attach import attach_region
from ecotone.node.disk import make_root
from ecotone.node.embedded import EmbeddedNode
from ecotone.node.exchange import Extent
from ecotone.node.region import Region, check_room
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.hosted import HostedNode, hosted_address
from ecotone.node.server.listen import Address, check_place
from ecotone.node.server.messages import Hello
from ecotone.node.server.worker import WorkerNode
from ecotone.protocol.connector import (
    ECConnectorFactory,
    ECRole,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
)
from ecotone.protocol.roundtrip import check_round_trip

# The scheduler half is there before the first order, and its node with it: an attach that takes longer has failed.
ATTACH_TIMEOUT_S = 5.0

_N = TypeVar("_N", EmbeddedNode, HostedNode)


class EcotoneConnectorFactory(ECConnectorFactory):
    """Ecotone's own connector, over a node.

    Args:
        hosted: where no node is named, the workers reach the one in the scheduler's process over a socket, and
            tell it themselves what they did: for engines that do not carry every report to the scheduler.
    """

    def __init__(self, hosted: bool = False) -> None:
        self._hosted = hosted

    def validate(self, role: ECRole, options: dict[str, Any]) -> None:  # noqa: ARG002 - every role is served
        """See the contract."""
        parse_options(options)

    def check_machine(self, role: ECRole, options: dict[str, Any]) -> None:  # noqa: ARG002
        """See the contract: a node must serve there, or there must be memory and a directory for one."""
        parsed = parse_options(options)
        if parsed.node_path is not None:
            check_place(parsed.node_path)
            return
        check_room(parsed.memory_bytes)
        if parsed.disk_config is not None:
            make_root(Path(parsed.disk_config.root))

    def scheduler_half(self, context: ECSchedulerContext) -> EcotoneSchedulerConnector:
        """A scheduler half and the node it talks to: inside it, or one that serves the host.

        Raises:
            ConfigError: options or participants that cannot work, or no node serves there.
            ResourceError: the machine does not have the memory.
        """
        options = parse_options(context.options)
        ranks = check_participants(context.participants)
        if options.node_path is not None:
            shared = _connect(context, options, options.node_path, ranks)
            return EcotoneSchedulerConnector(context, shared, options.pending_timeout_s)
        if self._hosted:
            return _over_hosted_node(context, options, ranks)
        node = _node_of(EmbeddedNode, context, options)
        exchange = node.connect(context.engine_id)
        return EcotoneSchedulerConnector(
            context, exchange, options.pending_timeout_s, node.close, node.check_integrity
        )

    def worker_half(self, context: ECWorkerContext) -> EcotoneWorkerConnector:
        """A worker half that attaches to the node of its engine when it gets its first order.

        Raises:
            ConfigError: options that cannot work, or views where there can be none.
        """
        options = parse_options(context.options)
        check_load_mode(options, context.device)
        on_cpu = context.device == "cpu"
        node = None
        attach = partial(_attach, context.engine_id, options)
        address = options.node_path or (hosted_address(context.engine_id) if self._hosted else None)
        if address is not None:
            node = _worker_node(context, options, address)
            attach = partial(node.attach, prefault=options.prefault)
        return EcotoneWorkerConnector(
            context,
            views=on_cpu and options.load != "copy",
            one_mapping=not on_cpu,  # the one that is page-locked, and not every device can lock a read-only one
            attach=attach,
            make_engine=partial(_make_engine, context),
            node=node,
        )


def _node_of(kind: type[_N], context: ECSchedulerContext, options: EcotoneOptions) -> _N:
    """A node in this process, as the operator wants it."""
    return kind(
        options.memory_bytes,
        context.engine_id,
        policy=options.policy,
        clock=context.clock,
        prefault=options.prefault,
        disk=options.disk_config,
    )


def _over_hosted_node(
    context: ECSchedulerContext, options: EcotoneOptions, ranks: tuple[int, ...]
) -> EcotoneSchedulerConnector:
    node = _node_of(HostedNode, context, options)
    with ExitStack() as stack:
        stack.callback(node.close)
        exchange = _connect(context, options, node.address, ranks)
        stack.callback(exchange.close)
        half = EcotoneSchedulerConnector(
            context, exchange, options.pending_timeout_s, node.close, node.check_integrity, node.statistics
        )
        stack.pop_all()
    return half


def _connect(
    context: ECSchedulerContext, options: EcotoneOptions, address: Address, ranks: tuple[int, ...]
) -> SharedNodeExchange:
    hello = Hello(context.engine_id, "scheduler", tenant=options.tenant, ranks=ranks)
    exchange = SharedNodeExchange(address, hello, context.clock)
    exchange.wait_until_connected(ATTACH_TIMEOUT_S)
    return exchange


def _worker_node(context: ECWorkerContext, options: EcotoneOptions, address: Address) -> WorkerNode:
    # A GPU's driver page-locks the mapping that it copies from, and not every one can lock a read-only mapping.
    only_reads = context.role == "ec_consumer" and context.device == "cpu"
    access: Literal["read", "write"] = "read" if only_reads else "write"
    hello = Hello(context.engine_id, "worker", access=access, tenant=options.tenant, rank=context.rank)
    return WorkerNode(address, hello, ATTACH_TIMEOUT_S)


def _attach(engine_id: str, options: EcotoneOptions, writable: bool) -> Region:
    return attach_region(engine_id, ATTACH_TIMEOUT_S, writable=writable, prefault=options.prefault)


def _make_engine(context: ECWorkerContext, region: Region) -> CopyEngine:
    if context.device == "cpu":
        return ThreadCopyEngine(context.wakeup, f"ecotone-copier-{context.rank}")
    own = region.descriptor
    whole = Extent(own.region_id, own.generation, 0, own.size)
    return CudaCopyEngine(context.device, region_bytes(region.view(whole, writable=True)))


class CheckedFactory(ECConnectorFactory):
    """Another factory, whose worker halves are refused when their reports would not survive the wire."""

    def __init__(self, inner: ECConnectorFactory) -> None:
        self._inner = inner

    def validate(self, role: ECRole, options: dict[str, Any]) -> None:
        """See the contract."""
        self._inner.validate(role, options)

    def check_machine(self, role: ECRole, options: dict[str, Any]) -> None:
        """See the contract."""
        self._inner.check_machine(role, options)

    def scheduler_half(self, context: ECSchedulerContext) -> ECSchedulerConnector:
        """See the contract."""
        return self._inner.scheduler_half(context)

    def worker_half(self, context: ECWorkerContext) -> ECWorkerConnector:
        """See the contract.

        Raises:
            RoundTripError: its ``worker_metadata_type`` would lose something on the way.
        """
        half = self._inner.worker_half(context)
        if half.worker_metadata_type is not None:
            check_round_trip(half.worker_metadata_type)
        return half


_FACTORIES: dict[str, type[ECConnectorFactory]] = {"EcotoneConnector": EcotoneConnectorFactory}


def create_factory(config: ECConfig) -> ECConnectorFactory:
    """The factory that ``config`` names, after it accepted role and options.

    Raises:
        ConfigError: an unknown name, a module or class that is not there or is no factory, or refused options.
    """
    factory = CheckedFactory(_factory_class(config.connector)())
    factory.validate(config.role, config.options)
    return factory


def _factory_class(name: str) -> type[ECConnectorFactory]:
    if name in _FACTORIES:
        return _FACTORIES[name]
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name):
        raise ConfigError(f"connector={name!r} is not one of {', '.join(_FACTORIES)}, nor 'module:Class'")
    try:
        found = getattr(import_module(module_name), class_name, None)
    except ImportError as error:
        raise ConfigError(f"connector={name!r}: module {module_name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ECConnectorFactory)):
        what = "there is no such class" if found is None else f"{class_name} is no ECConnectorFactory class"
        raise ConfigError(f"connector={name!r}: {what} in module {module_name!r}")
    return found
