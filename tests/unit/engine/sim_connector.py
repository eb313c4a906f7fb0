"""An EC connector's scheduler half that answers from a script and holds the scheduler to the contract."""

from __future__ import annotations

from ecotone.protocol.connector import (
    CacheLookup,
    ECConnectorContext,
    ECConnectorMetadata,
    ECItem,
    ECRole,
    ECSchedulerConnector,
)
from ecotone.protocol.outputs import ECConnectorOutput


class Orders(ECConnectorMetadata, frozen=True):
    """Keys that the ranks load, and save after they encoded them."""

    loads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()


class ScriptedConnector(ECSchedulerConnector):
    """Answers by what is ``stored`` and what is ``pending``, and holds the scheduler to the contract."""

    def __init__(self, role: ECRole = "ec_both", patience: int = 3) -> None:
        super().__init__(ECConnectorContext(engine_id="test", role=role, options={}))
        self.stored: set[str] = set()
        self.pending: set[str] = set()
        self.forgets = True
        self.patience = patience
        self.pending_work = False
        self.lookups: list[tuple[str, str]] = []
        self.finished: list[str] = []
        self.pending_answers = 0  # of the last pass
        self._waited: dict[tuple[str, str], int] = {}
        self._answers: dict[tuple[str, str], CacheLookup] = {}
        self._loads: list[str] = []
        self._saves: list[str] = []

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        self.lookups.append((req_id, item.key))
        asked = (req_id, item.key)
        if asked not in self._answers:
            self._answers[asked] = self._answer(asked)
        return self._answers[asked]

    def _answer(self, asked: tuple[str, str]) -> CacheLookup:
        if asked[1] in self.pending and self._waited.get(asked, 0) < self.patience:
            self._waited[asked] = self._waited.get(asked, 0) + 1
            return CacheLookup.PENDING
        return CacheLookup.READY if asked[1] in self.stored else CacheLookup.MISS

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        answer = self._answers[req_id, item.key]
        assert answer is not CacheLookup.PENDING
        assert item.key not in self._loads + self._saves, "told twice of one key in one step"
        (self._loads if answer is CacheLookup.READY else self._saves).append(item.key)

    def build_connector_meta(self) -> Orders | None:
        self.pending_answers = sum(a is CacheLookup.PENDING for a in self._answers.values())
        orders = Orders(tuple(self._loads), tuple(self._saves))
        self._answers.clear()
        self._loads.clear()
        self._saves.clear()
        return orders if orders.loads or orders.saves else None

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        if self.forgets:
            self.stored -= output.failed_loads

    def request_finished(self, req_id: str) -> None:
        self.finished.append(req_id)

    def has_pending_work(self) -> bool:
        return self.pending_work
