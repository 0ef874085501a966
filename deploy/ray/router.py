"""A request router for Ray Serve that sends a prompt where its prefix is cached. The rule is in
`affinity`; this is Ray's interface to it.

Invariant: a request that names its replica goes to that one while it runs; any other may go to
every replica, the preferred one first.
"""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deploy.ray.affinity import Call, PrefixTable


class PrefixRouter(RequestRouter):
    """Routes by prefix, and by load where no replica knows the prefix or those that do are much
    busier than others. With `affinity` False by load alone, which is there to be compared with.
    """

    def initialize_state(self, affinity: bool = True, **table: int) -> None:
        """Takes `request_router_kwargs`."""
        self._affinity = affinity
        self._table = PrefixTable(**table)
        self._loads: Counter[Any] = Counter()
        """Open requests by the replica's id, as Ray's cache of them has it, but not forgotten after
        10 seconds without a new request."""

    def on_send_request(self, replica_id: Any) -> None:
        """Called by Ray when it sends a request."""
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1

    def on_new_queue_len_info(self, replica_id: Any, num_ongoing_requests: int) -> None:
        """Called by Ray when a replica has told the number of its open requests."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._loads[replica_id] = num_ongoing_requests

    def decrement_queue_len_cache(self, replica_id: Any) -> None:
        """Called by Ray when a request has ended."""
        super().decrement_queue_len_cache(replica_id)
        self._loads[replica_id] = max(0, self._loads[replica_id] - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when replicas have come or gone."""
        super().update_replicas(replicas)
        self._table.keep_only(replica.replica_id.unique_id for replica in replicas)
        ids = {replica.replica_id for replica in replicas}
        self._loads = Counter(
            {replica_id: load for replica_id, load in self._loads.items() if replica_id in ids}
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The preferred replica, and then the others."""
        call: Any = (
            pending_request.args[0]
            if pending_request is not None and pending_request.args
            else None
        )
        if pending_request is None or not isinstance(call, Call):
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = (
            True  # Ray then waits before it asks again, where every replica is full.
        )
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if call.replica in replicas:
            return [[replicas[call.replica]]]
        loads = {name: self._loads[replica.replica_id] for name, replica in replicas.items()}
        keys = call.prefix if self._affinity else ()
        chosen = self._table.choose(keys, loads)
        self._table.remember(keys, chosen)
        return [[replicas.pop(chosen)], list(replicas.values())]
