"""Every error Ecotone raises, by whose fault it is.

EcotoneError
|-- ConfigError (ValueError)             the operator: a configuration that cannot work
|   `-- LostReportsError (NotImplementedError)   ... since the executor would lose reports
|-- ModelError                           the model folder: missing, unreadable, not what it says
|   `-- UnsupportedModelError            ... or of a family there is no adapter for
|-- RequestError (ValueError)            the caller: this request cannot be served, all others can
|   |-- InvalidMediaError                an image that cannot be read, or must not be
|   |-- PlaceholderError                 the prompt and the media do not match
|   |-- PromptTooLongError               more tokens than the model or the KV store can hold
|   |-- ItemTooLargeError                one item has more encoder rows than the encoder budget
|   `-- SamplingError                    sampling or pooling parameters outside their range
|-- RequestFailedError                   ours, for one request: it was accepted and could not be finished
|-- WireError                            the sender: bytes that are not a message
|   |-- DecodeError                      malformed, unknown field, out of bounds
|   `-- UnknownTypeError                 well formed, but of a type nobody registered here
|-- ContractError                        a component (connector, executor, rank) broke the step protocol
|   |-- MissingOutputError               ranks that returned nothing although something would be lost
|   |-- RoundTripError                   a message type that would not survive the wire
|   `-- IllegalTransitionError           an event that the state machine does not allow in this state
|-- RankFailedError                      a rank: it died, or raised something that is none of these
|-- RankTimeoutError (TimeoutError)      ranks that did not answer in the time they were given
|-- IntegrityError                       ours: what owns memory no longer adds up
|-- ResourceError                        the machine: memory, descriptors, a device
`-- ShutDownError                        the engine, node or connector was already closed
"""

from __future__ import annotations


class EcotoneError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(EcotoneError, ValueError):
    """The operator's configuration cannot work; the message names the value and what is allowed."""


class LostReportsError(ConfigError, NotImplementedError):
    """The executor does not deliver what the configuration needs; the message names those that do."""


class ModelError(EcotoneError):
    """The model folder is missing, unreadable, or not what its config says."""


class UnsupportedModelError(ModelError):
    """The model is of a family there is no adapter for."""


class RequestError(EcotoneError, ValueError):
    """The caller's request cannot be served; other requests are not affected."""


class InvalidMediaError(RequestError):
    """An image (or other media) that cannot be decoded, or is too large to be decoded safely."""


class PlaceholderError(RequestError):
    """The prompt has fewer or more media placeholders than media were given."""


class PromptTooLongError(RequestError):
    """The prompt has more tokens than the model's context or the KV store."""


class ItemTooLargeError(RequestError):
    """One item has more encoder rows than the encoder budget, or more tokens than a step where it must not be cut;
    the message names both sizes."""


class SamplingError(RequestError):
    """Sampling or pooling parameters outside their range."""


class RequestFailedError(EcotoneError):
    """An accepted request could not be finished; it alone ends with this error."""


class WireError(EcotoneError):
    """Bytes that came from elsewhere are not a message."""


class DecodeError(WireError):
    """Malformed bytes, an unknown field, or a value out of bounds."""


class UnknownTypeError(WireError):
    """A well-formed message with a type tag that nobody registered."""


class ContractError(EcotoneError):
    """A connector, an executor or a rank broke the step protocol."""


class MissingOutputError(ContractError):
    """Ranks returned no output although a report would be lost. ``ranks`` names them."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class RoundTripError(ContractError):
    """A message type that would not survive encoding and decoding unchanged."""


class IllegalTransitionError(ContractError):
    """An event that a state machine does not allow in its present state."""


class RankFailedError(EcotoneError):
    """A rank died, or raised an error of somebody else's. ``rank`` names it, the message also the cause."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeoutError(EcotoneError, TimeoutError):
    """Ranks did not answer a call in the time it was given. ``ranks`` names them."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class IntegrityError(EcotoneError):
    """The books of something that owns memory do not add up; found by a ``check_integrity()``."""


class ResourceError(EcotoneError):
    """The machine cannot give what was asked for (memory, descriptors, a device)."""


class ShutDownError(EcotoneError):
    """The engine, node or connector was already closed."""
