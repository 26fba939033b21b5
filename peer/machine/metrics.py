"""A peer's status as Prometheus metrics, on a port of its own: base units, names that begin with `gossamer_`.

Each metric is a value of the status; docs/reference/metrics.md describes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric, StateSetMetricFamily
from prometheus_client.exposition import start_http_server
from prometheus_client.registry import Collector, CollectorRegistry

from gossamer.peer.machine.partners import routes
from gossamer.peer.machine.states import STATES
from gossamer.peer.machine.status import Status
from gossamer.protocol.errors import BadSettings


@contextlib.contextmanager
def serving_metrics(address: str, port: int, status: Callable[[], Status]) -> Iterator[None]:
    """Answer Prometheus at this address from a thread of its own while the body runs. Raises BadSettings where the port is not free."""
    registry = CollectorRegistry()
    registry.register(StatusMetrics(status))
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadSettings(f"cannot show metrics on {address}, port {port}: {reason}", hint="choose another with --metrics") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class StatusMetrics(Collector):
    """Yields the metrics of the current status at each scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._most: dict[str, float] = {}  # of each counter: a trainer that goes on from a checkpoint has made fewer steps than before

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status = self._status()
        who = {"peer_id": status.peer_id, "run_id": status.run_id, "version": status.version}
        yield InfoMetricFamily("gossamer_peer", "Who this is.", who)
        states = {state: state == status.state for state in STATES}
        yield StateSetMetricFamily("gossamer_state", "1 for the state that the peer is in.", states)
        for name, (meaning, value) in _gauges(status).items():
            if value is not None:
                yield GaugeMetricFamily(name, meaning, value)
        for name, (meaning, value) in _counters(status).items():
            self._most[name] = max(value, self._most.get(name, 0.0))  # to Prometheus a smaller one is a new start from zero
            yield CounterMetricFamily(name, meaning, self._most[name])
        for family, values in _labelled(status):
            for label, value in values.items():
                family.add_metric([label], value)
            yield family


def _gauges(status: Status) -> dict[str, tuple[str, float | None]]:
    return {
        "gossamer_state_since_timestamp_seconds": ("When it entered that state.", status.since),
        "gossamer_run_steps": ("How far the run is: the schedule clock, in inner steps.", status.step),
        "gossamer_run_length_steps": ("Where the run ends.", status.total_steps),
        "gossamer_train_loss_nats": ("Training loss per token, mean of the last second.", status.loss),
        "gossamer_eval_loss_nats": ("Held-out loss per token, as last measured.", status.eval_loss),
        "gossamer_tokens_per_second": ("Trained by this peer, over the last ten seconds.", status.tokens_per_second),
        "gossamer_token_share_ratio": ("Of what this peer and those in sight have trained, its own; absent before.", status.token_share),
        "gossamer_month_bytes": ("Carried over the network in this calendar month, whatever for.", status.month_bytes),
        "gossamer_mfu_ratio": ("Share of the device's peak that goes into inner steps; absent where the peak is not known.", status.mfu),
        "gossamer_partners_in_sight": ("Other peers known to be there.", status.peers_seen),
        "gossamer_meeting_interval_steps": ("Mean countdown of a fragment to its next meeting.", status.inner_steps),
        "gossamer_warnings": ("What will do harm if it goes on.", len(status.warnings)),
        "gossamer_stage": ("In a staged run, the stage that this peer holds, from one.", _stage_number(status)),
    }


def _counters(status: Status) -> dict[str, tuple[str, float]]:
    return {
        "gossamer_inner_steps": ("Made by this peer, over all its sessions.", status.own_steps),
        "gossamer_tokens": ("Trained by this peer, over all its sessions.", status.tokens),
        "gossamer_train_seconds": ("In inner steps, and blocked between them.", status.train_seconds),
        "gossamer_blocked_seconds": ("Of these, spent on synchronization and checkpoints at step boundaries.", status.blocked_seconds),
        "gossamer_checkpoint_seconds": ("Of these, on checkpoints.", status.checkpoint_seconds),
        "gossamer_evaluation_seconds": ("Measuring the held-out loss; not part of train_seconds.", status.evaluation_seconds),
        "gossamer_energy_joules": ("Used by this peer, measured or estimated.", status.energy["watt_hours"] * 3600),
        **(_stage_counters(status) if status.stage else {}),
    }


def _stage_number(status: Status) -> float | None:
    return float(status.stage.split()[0]) if status.stage else None


def _stage_counters(status: Status) -> dict[str, tuple[str, float]]:
    return {
        "gossamer_starved_seconds": ("Without a micro-batch to compute; not part of train_seconds.", status.starved_seconds),
        "gossamer_hops_repeated": ("Sent to the next stage once more.", status.hops.get("repeated", 0)),
        "gossamer_hops_late": ("Answers of the next stage that did not come in time.", status.hops.get("late", 0)),
    }


def _labelled(status: Status) -> Iterator[tuple[GaugeMetricFamily | CounterMetricFamily, Mapping[str, float]]]:
    yield (
        GaugeMetricFamily("gossamer_connections", "Partners to whom a connection is open, by how it runs.", labels=["route"]),
        routes(status.partners),
    )
    yield CounterMetricFamily("gossamer_processor_seconds", "Processor time, by what for.", labels=["work"]), status.processor_seconds
    meetings = "Meetings that have ended, by what came of them; solo: outer steps without one."
    yield CounterMetricFamily("gossamer_meetings", meetings, labels=["outcome"]), status.meetings
    yield CounterMetricFamily("gossamer_meeting_bytes", "Carried in meetings.", labels=["direction"]), status.bytes
    if status.stage:
        yield from _of_a_stage(status)


def _of_a_stage(status: Status) -> Iterator[tuple[GaugeMetricFamily | CounterMetricFamily, Mapping[str, float]]]:
    hops = status.hops or {"outcomes": {}, "sent": 0, "received": 0}
    in_sight = {str(stage): float(count) for stage, count in enumerate(status.stage_holders, 1)}
    yield GaugeMetricFamily("gossamer_stage_holders", "Live peers in sight that hold each stage.", labels=["stage"]), in_sight
    yield CounterMetricFamily("gossamer_hops", "Micro-batches, by how they ended here.", labels=["outcome"]), hops["outcomes"]
    both = {way: hops[way] for way in ("sent", "received")}
    yield CounterMetricFamily("gossamer_hop_bytes", "Carried with micro-batches.", labels=["direction"]), both
    unanswered = {lane["partner"]: lane["unanswered"] for lane in status.lanes}
    yield GaugeMetricFamily("gossamer_lane_unanswered_hops", "Unanswered on each lane, by partner.", labels=["partner"]), unanswered
    usual_s = {lane["partner"]: lane["usual_s"] for lane in status.lanes if lane["usual_s"] is not None}
    yield GaugeMetricFamily("gossamer_lane_answer_seconds", "Usual time of an answer, by partner.", labels=["partner"]), usual_s
