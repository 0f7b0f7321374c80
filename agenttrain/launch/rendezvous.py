"""Where the launchers of all nodes meet before they start anything."""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from agenttrain.launch.config import DistributedConfig
from agenttrain.types import AgenttrainError

HERE = "127.0.0.1"
TRY_S = 5.0
"""One attempt to reach the first node."""
POLL_S = 0.2
TELL_S = 30.0
"""Between two lines about who is missing."""


class NotMet(AgenttrainError):
    """Not every node came; the message names those that are missing."""


class Meeting(RendezvousHandler):
    """Rendezvous for elastic's agent, which starts this node's workers: a store, and who is who."""

    def __init__(self, store: TCPStore, host: str, node: int, nodes: int) -> None:
        """`store` is the first node's, at `host`."""
        self._store, self._host, self._node, self._nodes = store, host, node, nodes

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and this node's number: everybody is here."""
        where = RendezvousStoreInfo(self._host, self._store.port)
        store = PrefixStore(self.get_run_id(), self._store)
        return RendezvousInfo(store, self._node, self._nodes, where)

    @property
    def use_agent_store(self) -> bool:
        """The workers meet at the same one."""
        return True

    def get_backend(self) -> str:
        """Its name in elastic's events."""
        return "agenttrain"

    def get_run_id(self) -> str:
        """Before every key of the agents."""
        return "agenttrain"

    def is_closed(self) -> bool:
        """Never: nobody comes later."""
        return False

    def set_closed(self) -> None:
        """Nothing is left to close."""

    def num_nodes_waiting(self) -> int:
        """None: nobody comes later."""
        return 0

    def shutdown(self) -> bool:
        """Return True, it is over: the store goes with this object."""
        return True


def meet(section: DistributedConfig, node: int) -> Meeting:
    """Return the meeting of all nodes, once they are there; of one node alone, at a free port.

    Raises NotMet after `timeout_s`.
    """
    if section.rendezvous is None:
        return Meeting(TCPStore(HERE, 0, 1, True, multi_tenant=True), HERE, node, 1)
    host, _, text = section.rendezvous.rpartition(":")
    port = int(text)
    if node > 0:
        _wait_for_listener(host, port, section, node)
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


def _wait_for_listener(host: str, port: int, section: DistributedConfig, node: int) -> None:
    """Wait until the first node listens: torch's own wait hears no signals, and is loud."""
    deadline = time.monotonic() + section.timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=TRY_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotMet(
                    f"distributed.rendezvous={host}:{port}: node {node} cannot reach it: {error}"
                ) from error
            time.sleep(POLL_S)


def _wait_for_all(store: TCPStore, section: DistributedConfig, node: int) -> None:
    store.set(f"node/{node}", socket.gethostname())
    deadline = time.monotonic() + section.timeout_s
    print_at = time.monotonic() + TELL_S
    while missing := [n for n in range(section.nodes) if not store.check([f"node/{n}"])]:
        who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if time.monotonic() > deadline:
            raise NotMet(
                f"distributed.nodes={section.nodes}: {who} did not come to {section.rendezvous} "
                f"within {section.timeout_s:g} s (distributed.timeout_s)"
            )
        if time.monotonic() > print_at:
            print_at += TELL_S
            print(f"node {node} waits for {who} at {section.rendezvous}", file=sys.stderr)
        time.sleep(POLL_S)
