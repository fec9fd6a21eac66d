"""Random tree operations against a plain in-memory model, with a restart among them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sessions.store import SessionStore
from tests.support.session_store import check_integrity


@dataclass
class Node:
    session: str
    parent: str | None
    content: str


@dataclass
class Model:
    """Insertion order of the dictionaries is creation order."""

    nodes: dict[str, Node] = field(default_factory=dict)
    heads: dict[str, str | None] = field(default_factory=dict)

    def siblings(self, node_id: str) -> list[str]:
        node = self.nodes[node_id]
        return [i for i, n in self.nodes.items() if (n.session, n.parent) == (node.session, node.parent)]

    def path(self, node_id: str | None) -> list[str]:
        path: list[str] = []
        while node_id is not None:
            path.insert(0, node_id)
            node_id = self.nodes[node_id].parent
        return path

    def leaf(self, node_id: str) -> str:
        children = [i for i, n in self.nodes.items() if n.parent == node_id]
        return self.leaf(children[-1]) if children else node_id

    def delete(self, node_id: str) -> None:
        node = self.nodes[node_id]
        gone = [i for i in self.nodes if node_id in self.path(i)]
        if self.heads[node.session] in gone:
            others = [i for i in self.siblings(node_id) if i != node_id]
            self.heads[node.session] = self.leaf(others[-1]) if others else node.parent
        for item in gone:
            del self.nodes[item]


class TreeMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    pick = st.integers(0, 10**6)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = SessionStore(self.folder / "s.db")
        self.model = Model()

    def some_node(self, session: str, pick: int) -> str | None:
        """A node of the session, or None (a place before the first message)."""
        own = [None, *(i for i, n in self.model.nodes.items() if n.session == session)]
        return own[pick % len(own)]

    @rule(target=sessions)
    def create(self) -> str:
        session = self.store.create()
        self.model.heads[session.id] = None
        return session.id

    @rule(session=sessions, pick=pick, content=st.text(max_size=8))
    def add(self, session: str, pick: int, content: str) -> None:
        parent = self.some_node(session, pick)
        message = self.store.add_message(session, parent, "user", content)
        self.model.nodes[message.id] = Node(session, parent, message.content)
        self.model.heads[session] = message.id

    @rule(session=sessions, content=st.text(max_size=8))
    def continue_branch(self, session: str, content: str) -> None:
        head = self.model.heads[session]
        message = self.store.add_message(session, head, "assistant", content)
        self.model.nodes[message.id] = Node(session, head, message.content)
        self.model.heads[session] = message.id

    @rule(session=sessions, pick=pick)
    def set_head(self, session: str, pick: int) -> None:
        node = self.some_node(session, pick)
        self.store.set_head(session, node)
        self.model.heads[session] = node

    @rule(session=sessions, pick=pick)
    def delete_message(self, session: str, pick: int) -> None:
        node = self.some_node(session, pick)
        if node is not None:
            self.store.delete_message(node)
            self.model.delete(node)

    @rule(target=sessions, session=sessions, pick=pick)
    def fork(self, session: str, pick: int) -> object:
        upto = self.some_node(session, pick)
        path = self.model.path(self.model.heads[session] if upto is None else upto)
        fork = self.store.copy_branch(session, upto)
        self.adopt(fork.id)
        assert [self.model.nodes[i].content for i in self.model.path(fork.head_id)] == [
            self.model.nodes[i].content for i in path
        ]
        return fork.id

    @rule(target=sessions, session=sessions)
    def copy_by_export(self, session: str) -> object:
        return self.adopt(self.store.import_(self.store.export(session)).id)

    @rule(session=consumes(sessions))
    def delete_session(self, session: str) -> None:
        self.store.delete(session)
        del self.model.heads[session]
        for node in [i for i, n in self.model.nodes.items() if n.session == session]:
            del self.model.nodes[node]

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = SessionStore(self.folder / "s.db")

    def adopt(self, session: str) -> str:
        """Take a copied session's new ids into the model."""
        data = self.store.export(session)
        for item in data["messages"]:
            self.model.nodes[item["id"]] = Node(session, item["parent_id"], item["content"])
        self.model.heads[session] = data["session"]["head_id"]
        return session

    @invariant()
    def the_store_agrees(self) -> None:
        assert {item.id for item in self.store.list()} == set(self.model.heads)
        for session, head in self.model.heads.items():
            branch = self.store.branch(session)
            path = self.model.path(head)
            assert [m.id for m in branch.messages] == path
            assert [m.content for m in branch.messages] == [self.model.nodes[i].content for i in path]
            assert {i: list(ids) for i, ids in branch.siblings.items()} == {i: self.model.siblings(i) for i in path}
            if path:
                assert self.store.leaf_below(path[0]) == self.model.leaf(path[0])

    def teardown(self) -> None:
        check_integrity(self.store)
        self.store.close()
        shutil.rmtree(self.folder)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=25, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])
