"""The rules, as data: what a report names, and what the text beside a violation says."""

from __future__ import annotations

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """One rule.

    Attributes:
        name: how reports, tests and people refer to it.
        text: what must hold.
        needs: the capability without which it says nothing; empty where it holds for everybody.
    """

    name: str
    text: str
    needs: str = ""


CONNECTOR_RULES = (
    Rule(
        "ready-after-every-report",
        "READY is said of a key only after every rank that takes part reported its save. An order given, a number "
        "of steps or a count of reports is no such thing: one rank may report twice, and another late.",
        "reports_decide",
    ),
    Rule(
        "failed-loads-are-forgotten",
        "Once the scheduler half heard that a load of a key failed, it is not READY before it is saved again.",
        "hears_failed_loads",
    ),
    Rule(
        "ready-is-loaded",
        "In an engine that cannot do without a load, READY is a promise: every load that a step orders is in the "
        "encoder cache of every rank once it is settled, and none raises, whatever became of the store meanwhile.",
        "must_load",
    ),
    Rule(
        "right-rows",
        "What a load puts into the encoder cache is what was saved under its key: this item's rows, of these "
        "weights, in order. What cannot be had is left out.",
    ),
    Rule(
        "held-rows-stay",
        "Rows in a rank's encoder cache do not change while it holds them, whatever else is stored or evicted.",
    ),
    Rule(
        "cache-only-what-was-ordered",
        "The worker half puts the step's loads into the encoder cache and nothing else, and takes nothing out.",
    ),
    Rule(
        "same-answer-within-a-pass",
        "lookup answers READY, PENDING or MISS, and the same when it is asked again before build_connector_meta.",
    ),
    Rule(
        "errors-are-reports",
        "No hook raises in a correct step. What goes wrong with a transfer is a report, or a key left out.",
    ),
    Rule("orders-cross-the-wire", "What build_connector_meta returns comes through the wire format unchanged."),
    Rule("reports-cross-the-wire", "What a worker half reports comes through the wire format unchanged."),
    Rule(
        "reports-join",
        "Reports of ranks and steps, joined in any order, grouped in any way and with repetitions, say the same.",
    ),
    Rule("metadata-is-declared", "build_connector_worker_meta returns a worker_metadata_type, or None."),
    Rule(
        "counters-only-grow",
        "get_ec_connector_stats has the counters of its own rank and epoch, cumulative: none of them ever falls.",
    ),
    Rule(
        "every-request-ends",
        "Every request ends in bounded time: PENDING is not for ever, also when a report comes late or never.",
    ),
    Rule(
        "same-tokens",
        "Encoded, loaded or held: a prompt's answer is the same, token by token.",
    ),
    Rule(
        "awake-while-pending",
        "has_pending_work() holds while a save was ordered and a rank has yet to report it: an engine without "
        "requests stops stepping, and would never hear of it.",
        "rests_on_its_own",
    ),
    Rule("rests-when-done", "has_pending_work() ends once everything that was ordered is reported."),
    Rule(
        "saved-is-found",
        "One small item, saved and reported by every rank, is READY for the next request.",
        "stores",
    ),
    Rule("consumer-stores-nothing", "In an engine of role ec_consumer nothing that it encodes becomes READY."),
    Rule(
        "reset-forgets",
        "After reset_cache(namespace) no key of the namespace is READY, late reports or not.",
        "reset",
    ),
    Rule("books-balance", "check_integrity() finds nothing, after every step and at the end."),
    Rule(
        "shutdown-at-any-time", "shutdown() of either half, in the middle of transfers or twice, does not raise."
    ),
    Rule(
        "found-after-restart",
        "What was READY before a clean restart is READY, or at least loads rightly, after it.",
        "durable",
    ),
    Rule(
        "loss-is-a-failed-load",
        "What vanishes from the store between lookup and load is a failed load: no error, no other rows.",
        "can_lose",
    ),
    Rule("loads-share-memory", "Two loads of an entry that both live are views of the same memory.", "zero_copy"),
)

METADATA_RULES = (
    Rule("metadata-is-pure", "aggregate changes neither operand, and gives the same twice."),
    Rule("metadata-is-commutative", "a.aggregate(b) == b.aggregate(a)"),
    Rule("metadata-is-associative", "a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))"),
    Rule(
        "metadata-is-idempotent",
        "a.aggregate(a) == a, and a join joined with a part of it again is the same join.",
    ),
    Rule(
        "metadata-aggregates-all",
        "aggregate_all of any number of reports is what joining them one by one gives.",
        "joins_all",
    ),
    Rule("metadata-round-trips", "decode(encode(a)) == a, of the same type."),
    Rule("metadata-counts-when-falsy", "A report arrives and joins whatever its truth value, len() or emptiness."),
)

EXECUTOR_RULES = (
    Rule(
        "delivers-every-rank", "A step's folded answer has the report of every rank, on every way out of a step."
    ),
    Rule("delivers-empty-outputs", "A step in which nobody reports anything gives an output without an EC part."),
    Rule("chains-aggregators", "EC and KV reports are folded beside each other; neither disturbs the other."),
    Rule("names-every-participant", "participants() names every rank with an encoder, once."),
    Rule("names-a-rank-that-raises", "An error raised on a rank reaches the caller, naming rank and cause."),
    Rule("names-a-dead-rank", "A rank that is killed is named; the step does not hang.", "kill"),
    Rule(
        "refuses-what-it-cannot-deliver",
        "An executor that does not bring back every rank's output refuses a connector on several ranks.",
    ),
    Rule("ends-once-and-for-all", "shutdown() twice is once; afterwards every call raises ShutDownError."),
)
