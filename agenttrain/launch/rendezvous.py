"""Rendezvous of the launchers of all nodes, before they start their workers."""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from agenttrain.launch.config import DistributedConfig
from agenttrain.types import AgenttrainError

LOCALHOST = "127.0.0.1"
TRY_S = 5.0
"""Seconds of one attempt to reach the first node."""
POLL_S = 0.2
"""Seconds between two looks for nodes."""
PRINT_S = 30.0
"""Seconds between two lines about missing nodes."""


class NotMet(AgenttrainError):
    """A node did not reach the rendezvous in time; the message names the missing ones."""


class Meeting(StaticTCPRendezvous):
    """Completed rendezvous of all nodes, in the form that torch elastic's agent takes."""

    def __init__(self, store: TCPStore, host: str, node: int, nodes: int) -> None:
        """Take the first node's store and name, and the numbers of this node and of all."""
        super().__init__(host, store.port, node, nodes, run_id="agenttrain", timeout=0)
        self._store = store


def meet(section: DistributedConfig, node: int) -> Meeting:
    """Wait until all nodes have come to `rendezvous`; raises NotMet after `timeout_s`.

    A single node does not wait, and takes a free port.
    """
    if section.rendezvous is None:
        # Port 0: a free one.
        store = TCPStore(LOCALHOST, 0, world_size=1, is_master=True, multi_tenant=True)
        return Meeting(store, LOCALHOST, node, nodes=1)
    host, _, text = section.rendezvous.rpartition(":")
    port = int(text)
    deadline = time.monotonic() + section.timeout_s
    is_reachable = node == 0  # the first node itself listens
    # Wait until the first node listens: torch's own wait ignores signals, and prints a lot.
    while not is_reachable:
        try:
            socket.create_connection((host, port), timeout=TRY_S).close()
            is_reachable = True
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotMet(
                    f"distributed.rendezvous={host}:{port}: node {node} cannot reach it: {error}"
                ) from error
            time.sleep(POLL_S)
    try:
        store = TCPStore(
            host,
            port,
            world_size=section.nodes,
            is_master=node == 0,
            timeout=timedelta(seconds=section.timeout_s),
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
