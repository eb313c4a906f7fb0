"""A rank's process, from the inside: its messages lie ready, and it ends when they do."""

import os
import select
import signal
import threading

import pytest
from executor_kinds import tiny_config

from ecotone.errors import DecodeError
from ecotone.executor import rank_main
from ecotone.executor.channel import channel_pair, packed
from ecotone.executor.messages import Call, Reply, Start, Started, encode_config
from ecotone.executor.methods import decode_result
from ecotone.executor.process import RankProcess, rank_environment
from ecotone.protocol.wire import decode, encode
from ecotone.testing.executors import TINY_RANK
from ecotone.worker.ranks import RankSpec


@pytest.fixture
def serve(monkeypatch):
    """Let a rank serve ``messages``, then hang up; its replies. ``signalled`` is what it counted."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def run(*messages, hang_up_first=False):
        own, other = channel_pair()
        for message in messages:
            with packed(message) as packet:
                own.send(packet)
        replies = []

        def collect():
            # Until it was answered as often as it was asked, then hang up.
            poll = select.poll()
            poll.register(own.fileno(), select.POLLIN)
            for _ in messages:
                poll.poll(60_000)
                replies.append(decode(own.receive(), Reply))
            own.close()

        if hang_up_first:
            own.close()
        else:
            threading.Thread(target=collect, daemon=True).start()
        rank_main.main(other.detach(), wakeup_fd)
        assert handlers[signal.SIGINT] is signal.SIG_IGN
        return replies

    run.wakeup_fd = wakeup_fd
    yield run
    os.close(wakeup_fd)


def start(role=None, make_rank=TINY_RANK, **script):
    config = encode_config(tiny_config(1, role, **script))
    return encode(Start(config=config, engine_id="e", spec=RankSpec(), epoch=0, make_rank=make_rank))


def test_it_serves_until_the_executor_hangs_up(serve):
    started, statistics, shut = serve(start("ec_both"), encode(Call(1, "statistics")), encode(Call(2, "shutdown")))
    assert decode(started.result, Started).pid == os.getpid()
    assert decode(started.result, Started).takes_part is True
    assert (started.seq, statistics.seq, shut.seq) == (0, 1, 2)
    assert decode_result("statistics", statistics.result)["pid"] == os.getpid()
    assert shut.fault is None


def test_one_rank_after_another_in_one_process(serve):
    replies = serve(
        start(), encode(Call(1, "shutdown")), encode(Call(2, "statistics")), start(), encode(Call(3, "statistics"))
    )
    assert [reply.fault is None for reply in replies] == [True, True, False, True, True]
    assert replies[2].fault.text == "statistics: the rank was not started, or was shut down"


def test_what_is_wrong_is_an_answer(serve):
    replies = serve(
        start(make_rank="no.such:thing"),
        encode(Call(1, "format_disk")),
        start(),
        encode(Call(2, "execute_model", (b"\xc1",))),
        encode(Call(3, "execute_model")),
        encode(Call(4, "sample_tokens", (), 7)),  # it is not asked, and answers since it raises
    )
    faults = [reply.fault and (reply.fault.kind, reply.fault.method) for reply in replies]
    assert faults == [
        ("ConfigError", "start"),
        ("ContractError", "format_disk"),
        None,
        ("DecodeError", "execute_model"),
        ("ContractError", "execute_model"),
        ("ContractError", "sample_tokens"),
    ]
    assert all("Traceback" in reply.fault.trace for reply in replies if reply.fault)


def test_a_hang_up_in_the_middle_is_an_end(serve):
    assert serve(start(), encode(Call(1, "statistics")), hang_up_first=True) == []


def test_what_is_no_message_ends_it(serve):
    own, other = channel_pair()
    with packed(b"\xc1") as packet:
        own.send(packet)
    with pytest.raises(DecodeError):
        rank_main.main(other.detach(), serve.wakeup_fd)
    own.close()


def test_a_rank_that_is_still_starting_ends_with_its_executor(tmp_path):
    # A torch that never finishes its import stands for a machine on which that takes minutes.
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    environment = rank_environment(1)
    wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK)
    rank = RankProcess(
        wakeup_fd, {**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}
    )
    try:
        rank.close()
        assert rank.wait(60)
        assert "was killed by SIGKILL" in rank.cause_of_end()
    finally:
        rank.kill()
        os.close(wakeup_fd)
