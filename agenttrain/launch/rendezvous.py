"""Rendezvous of the launchers of all nodes, before they start their workers."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from agenttrain.launch.config import DistributedConfig
from agenttrain.types import AgenttrainError

LOCALHOST = "127.0.0.1"
TRY_S = 5.0
"""One attempt to reach the first node."""
POLL_S = 0.2
PRINT_S = 30.0
"""Seconds between two lines about missing nodes."""


class NotMet(AgenttrainError):
    """Not every node came in time; the message names the missing ones."""


@dataclass(frozen=True, eq=False)
class Meeting(RendezvousHandler):
    """Rendezvous for elastic's agent, which starts this node's workers: a store, and the numbers of
    this node and of all."""

    store: TCPStore
    """The first node's."""
    host: str
    """Name of the first node."""
    node: int
    nodes: int

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and this node's number; all nodes have come already."""
        address = RendezvousStoreInfo(self.host, self.store.port)
        store = PrefixStore(self.get_run_id(), self.store)
        return RendezvousInfo(store, self.node, self.nodes, address)

    @property
    def use_agent_store(self) -> bool:
        """Return True: the workers use the agents' store."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous in elastic's events."""
        return "agenttrain"

    def get_run_id(self) -> str:
        """Return the prefix of the agents' keys."""
        return "agenttrain"

    def is_closed(self) -> bool:
        """Return False: there is no second rendezvous to close."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node comes later."""
        return 0

    def shutdown(self) -> bool:
        """Return True: the store ends with this object."""
        return True


def meet(section: DistributedConfig, node: int) -> Meeting:
    """Wait for all nodes and return their meeting; a single node takes a free port.

    Raises NotMet after `timeout_s`.
    """
    if section.rendezvous is None:
        return Meeting(TCPStore(LOCALHOST, 0, 1, True, multi_tenant=True), LOCALHOST, node, 1)
    host, _, text = section.rendezvous.rpartition(":")
    port = int(text)
    deadline = time.monotonic() + section.timeout_s
    reachable = node == 0
    # Wait until the first node listens: torch's own wait ignores signals, and prints a lot.
    while not reachable:
        try:
            socket.create_connection((host, port), timeout=TRY_S).close()
            reachable = True
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotMet(
                    f"distributed.rendezvous={host}:{port}: node {node} cannot reach it: {error}"
                ) from error
            time.sleep(POLL_S)
    try:
        store = TCPStore(
            *(host, port, section.nodes, node == 0, timedelta(seconds=section.timeout_s)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistNetworkError, DistStoreError) as error:
        problem = str(error).partition("\n")[0]
        raise NotMet(
            f"distributed.rendezvous={host}:{port}: does not work on {socket.gethostname()}: "
            f"{problem}; is it the first node's name, and is the port free there?"
        ) from error
    _wait_for_all(store, section, node)
    return Meeting(store, host, node, section.nodes)


def _wait_for_all(store: TCPStore, section: DistributedConfig, node: int) -> None:
    """Announce this node in the store, and wait until all the others have."""
    store.set(f"node/{node}", socket.gethostname())
    deadline = time.monotonic() + section.timeout_s
    print_at = time.monotonic() + PRINT_S
    while missing := [n for n in range(section.nodes) if not store.check([f"node/{n}"])]:
        nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if time.monotonic() > deadline:
            raise NotMet(
                f"distributed.nodes={section.nodes}: {nodes} did not come to {section.rendezvous} "
                f"within {section.timeout_s:g} s (distributed.timeout_s)"
            )
        if time.monotonic() > print_at:
            print_at += PRINT_S
            print(f"node {node} waits for {nodes} at {section.rendezvous}", file=sys.stderr)
        time.sleep(POLL_S)
